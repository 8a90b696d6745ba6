"""A process of `RewardPool`: reads samples, answers outcomes, ends with its parent."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from multiprocessing.connection import Connection

from quadriga.errors import QuadrigaError
from quadriga.rewards.functions import FunctionRef, RewardFunction
from quadriga.rewards.outcome import RAISED, Outcome, Sample, call
from quadriga.rewards.pool import STARTED


def serve(connection: Connection) -> None:
    """Answer samples until the other end is closed."""
    load = functools.cache(FunctionRef.load)
    connection.send(STARTED)
    while True:
        try:
            sample: Sample = connection.recv()
        except EOFError:
            return
        connection.send(_score(connection, sample, load))


def _score(connection: Connection, sample: Sample, load: object) -> Outcome:
    try:
        function: RewardFunction = load(sample.function)  # type: ignore[operator]
    except QuadrigaError as error:
        return Outcome(RAISED, detail=str(error))
    connection.send(STARTED)
    return call(function, sample)


def _end_with(parent: int) -> None:
    """A hanging function must not outlive the run that asked for it."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    serve(Connection(int(sys.argv[1])))
