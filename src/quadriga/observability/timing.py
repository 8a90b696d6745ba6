"""Where a step's time goes: named spans, added up until they are taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timer:
    """`with timer("rollout"): …` adds to `time/rollout`, in seconds; spans may nest and repeat.

    `on_enter` hears the name of each span as it begins, for a display of what is going on.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.perf_counter,
        on_enter: Callable[[str], None] | None = None,
    ) -> None:
        self._clock, self._on_enter = clock, on_enter
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self._on_enter is not None:
            self._on_enter(name)
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start

    def seconds(self, name: str) -> float:
        """Seconds spent in a span since the last `take`; 0 if it was not entered."""
        return self._seconds.get(name, 0.0)

    def take(self) -> dict[str, float]:
        """`time/<span>` → seconds since the last call, and start again from nothing."""
        taken = {f"time/{name}": value for name, value in self._seconds.items()}
        self._seconds = {}
        return taken
