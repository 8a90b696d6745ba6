"""Stop the processes of engines that are not measured now: an idle one can keep a core busy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil

from quadriga.rollout.base import RolloutEngine, RolloutOutput


def processes(known: Sequence[psutil.Process] = ()) -> list[psutil.Process]:
    """Return the processes below this one that are not known."""
    return [p for p in psutil.Process().children(recursive=True) if p not in known]


@contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Stop processes within the block."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


class Alone:
    """A rollout engine that generates while other processes are stopped."""

    def __init__(self, engine: RolloutEngine, others: Sequence[psutil.Process]) -> None:
        self.engine, self.others = engine, others

    def generate(self, *request: Any) -> RolloutOutput:
        """Generate as the engine does."""
        with stopped(self.others):
            return self.engine.generate(*request)
