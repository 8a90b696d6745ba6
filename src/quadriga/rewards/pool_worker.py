"""The program that a process of `RewardPool` runs: receive a sample, score it, send the outcome."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from quadriga.errors import QuadrigaError
from quadriga.rewards.functions import FunctionRef, RewardFunction
from quadriga.rewards.outcome import RAISED, Outcome, Sample, call
from quadriga.rewards.pool import STARTED


def serve(connection: Connection) -> None:
    """Score samples until the pool closes its end of the connection."""
    load = functools.cache(FunctionRef.load)
    connection.send(STARTED)
    while True:
        try:
            sample: Sample = connection.recv()
        except EOFError:
            return
        connection.send(_score(connection, sample, load))


def _score(
    connection: Connection, sample: Sample, load: Callable[[FunctionRef], RewardFunction]
) -> Outcome:
    try:
        function = load(sample.function)
    except QuadrigaError as error:
        return Outcome(RAISED, detail=str(error))
    connection.send(STARTED)  # from here on the deadline of the sample runs
    return call(function, sample)


def _exit_with_parent(parent: int) -> None:
    """Exit when the parent process has ended.

    A function that hangs never returns to `serve`, so the closed connection is not noticed there.
    When the parent ends, this process gets another parent, and `getppid` changes.
    """
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    serve(Connection(int(sys.argv[1])))
