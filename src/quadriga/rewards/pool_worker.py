"""The program that a process of `RewardPool` runs: receive a sample, score it, report the outcome.

`python -m quadriga.rewards.pool_worker CONNECTION MEGABYTES` starts two processes: a supervisor and
its child, which scores. The supervisor ends the child with everything that it has started.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from quadriga.containment import describe
from quadriga.errors import QuadrigaError
from quadriga.rewards.functions import FunctionRef, RewardFunction
from quadriga.rewards.outcome import RAISED, Outcome, Report, Sample, call
from quadriga.rewards.supervisor import adopt_orphans, die_with_parent, supervise


def serve(connection: Connection) -> None:
    """Score samples until the pool closes its end of the connection."""
    load = functools.cache(FunctionRef.load)
    # A copy of this process that a function forks must not hold the connection: it could write to
    # it, and the pool would not see the end of this process.
    os.register_at_fork(after_in_child=connection.close)
    process = os.getpid()
    connection.send_bytes(Report(-1, process).encode())
    while True:
        try:
            number, sample = connection.recv()
        except EOFError:
            return
        outcome = _score(connection, number, sample, load)
        if os.getpid() != process:  # the function has forked, and this is the copy
            os._exit(0)
        # An alarm that the function has set must not interrupt the next sample.
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send_bytes(Report(number, process, outcome).encode())


def _score(
    connection: Connection,
    number: int,
    sample: Sample,
    load: Callable[[FunctionRef], RewardFunction],
) -> Outcome:
    try:
        function = load(sample.function)
    except QuadrigaError as error:
        return Outcome(RAISED, detail=describe(error))
    # From here on the deadline of the sample runs.
    connection.send_bytes(Report(number, os.getpid()).encode())
    return call(function, sample)


def limit_memory(megabytes: int) -> None:
    """Bound the memory that this process and each of its children can allocate; 0: no bound.

    The limit is on private writable memory and not on address space, of which libraries reserve
    much more than they use.
    """
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if megabytes:
        resource.setrlimit(resource.RLIMIT_DATA, (megabytes << 20, megabytes << 20))


def main() -> None:
    """Fork the process that scores, and supervise it."""
    fd, megabytes = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(fd, False)  # programs that a function starts do not get the connection
    adopt_orphans()
    output, its_output = os.pipe()
    worker = os.fork()
    if worker:
        os.close(fd)
        os.close(its_output)
        supervise(worker, output)
    os.setpgid(0, 0)
    die_with_parent()
    os.dup2(its_output, 1)
    os.dup2(its_output, 2)
    os.close(output)
    os.close(its_output)
    limit_memory(megabytes)
    serve(Connection(fd))


if __name__ == "__main__":
    main()
