"""The program that a process of `RewardPool` runs: receive a sample, score it, report the outcome.

`python -P -m quadriga.rewards.pool_worker CONNECTION MEGABYTES FOLDER…` starts two processes: a
supervisor and its child, which scores. The supervisor ends the child with everything that it has
started. The folders, which the controller has in its `sys.path`, are searched last.
"""

import asyncio
import contextlib
import functools
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NoReturn

from quadriga.containment import (
    ADOPTS_ORPHANS,
    ENDS_WITH_PARENT,
    describe,
    end_all,
    open_output,
    prctl,
    reap,
)
from quadriga.errors import QuadrigaError
from quadriga.rewards import functions
from quadriga.rewards.pool import Report


def serve(connection: Connection) -> NoReturn:
    """Score samples. Raises `EOFError` or `ConnectionError` when the pool closes its end."""
    process = os.getpid()
    # One event loop for all coroutines: locks and clients of the user's file belong to it.
    loop = asyncio.Runner()
    while True:
        number, samples, timeout_s, in_threads = connection.recv()
        function = _load(samples[0].function)
        if isinstance(function, functions.Outcome):
            outcomes = [function] * len(samples)
        else:
            # From here on the deadline of the samples runs.
            connection.send_bytes(Report(number, process).encode())
            if in_threads:
                outcomes = functions.call_in_threads(function, samples, timeout_s)
            elif samples[0].function.form.waits:
                outcomes = loop.run(functions.call_at_once(function, samples, timeout_s))
            else:
                outcomes = [functions.call(function, samples[0])]
        if os.getpid() != process:  # the function has forked, and this is the copy
            os._exit(0)
        # An alarm that the function has set must not interrupt the next sample.
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send_bytes(Report(number, process, outcomes).encode())


@functools.cache
def _load(ref: functions.FunctionRef) -> functions.RewardFunction | functions.Outcome:
    """Return the function, or the outcome of all its samples. Its file is imported once."""
    try:
        return ref.load()
    except QuadrigaError as error:
        return functions.Outcome(functions.RAISED, detail=describe(error))


def limit_memory(megabytes: int) -> None:
    """Bound the memory that this process and each of its children can allocate; 0: no bound.

    The limit is on private writable memory and not on address space, of which libraries reserve
    much more than they use.
    """
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if megabytes:
        resource.setrlimit(resource.RLIMIT_DATA, (megabytes << 20, megabytes << 20))


def run_program(serve: Callable[[Connection], NoReturn]) -> None:
    """Fork the process that serves the pool and tells it that it is ready, and supervise it."""
    fd, megabytes = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(fd, False)  # programs that a function starts do not get the connection
    # The supervisor becomes the parent of descendants whose own parent has ended.
    prctl(ADOPTS_ORPHANS, 1)
    output, its_output = os.pipe()
    worker = os.fork()
    if worker:
        os.close(fd)
        os.close(its_output)
        supervise(worker, output)
    os.setpgid(0, 0)
    prctl(ENDS_WITH_PARENT, signal.SIGKILL)  # the kernel kills it when the supervisor ends
    os.dup2(its_output, 1)
    os.dup2(its_output, 2)
    os.close(output)
    os.close(its_output)
    sys.stdout = sys.stderr = None  # they may be files, and cannot seek in a pipe
    open_output()
    limit_memory(megabytes)
    sys.path.extend(path for path in sys.argv[3:] if path not in sys.path)
    connection = Connection(fd)
    # A copy of this process that a function forks must not hold the connection: it could write to
    # it, and the pool would not see the end of this process.
    os.register_at_fork(after_in_child=connection.close)
    with contextlib.suppress(EOFError, ConnectionError):
        connection.send_bytes(Report(-1, os.getpid()).encode())
        serve(connection)


_CHECK_S = 0.5  # how often to look whether the controller or the worker has ended
_SOON_S = 0.02  # the same when the output is closed, as at the end of the worker
_LAST_READS = 16  # reads of the output that is left when the processes have ended
_CUT = b"\n[functions and environments print too much; the rest is left out]\n"


class OutputBudget:
    """At most `size` bytes are passed on in a minute, so a day of constant output is 94 MB."""

    def __init__(self, size: int = 1 << 16) -> None:
        self._size = size
        self._left = 0
        self._ends = -math.inf
        self._cut = False

    def allow(self, data: bytes) -> bytes:
        """Return the part of `data` to pass on, with a note where the first part is left out."""
        now = time.monotonic()
        if now >= self._ends:
            self._left, self._ends, self._cut = self._size, now + 60, False
        allowed = data[: self._left]
        self._left -= len(allowed)
        note = b"" if self._cut or len(allowed) == len(data) else _CUT
        self._cut = self._cut or bool(note)
        return allowed + note


def supervise(worker: int, output: int) -> NoReturn:
    """Wait until the worker, the pool or the controller ends this process, then end all of them.

    Args:
        worker: process id of a child of this process, which leads a process group.
        output: the end of a pipe from which the worker's output is read.
    """
    parent, budget = os.getppid(), OutputBudget()
    outputs, ended = [output], None
    signal.signal(signal.SIGTERM, _stop)
    with contextlib.suppress(_Stopped):
        while ended is None and os.getppid() == parent:
            ready, _, _ = select.select(outputs, [], [], _CHECK_S if outputs else _SOON_S)
            if ready and not _forward(output, budget):
                outputs = []  # closed: the worker has ended or closed its output
            ended = reap(worker)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it would interrupt `end_all`
    end_all(worker)
    for _ in range(_LAST_READS):
        if not select.select(outputs, [], [], 0)[0] or not _forward(output, budget):
            break
    _end_as(ended)


class _Stopped(Exception):
    """The pool ends this process."""


def _stop(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another one does not interrupt `end_all`
    raise _Stopped


def _forward(output: int, budget: OutputBudget) -> bool:
    """Pass on what the worker has printed; return False at the end of its output."""
    data = os.read(output, 1 << 16)
    with contextlib.suppress(OSError):  # standard error is closed: the output is lost
        os.write(2, budget.allow(data))
    return bool(data)


def _end_as(status: int | None) -> NoReturn:
    """End this process as the worker ended: with its exit code, or by the same signal."""
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.pause()
    os._exit(os.WEXITSTATUS(status) if status is not None else 1)


if __name__ == "__main__":
    run_program(serve)
