"""Measure where the time of a step is spent, in named spans."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timer:
    """Adds up the seconds spent in named spans.

    `with timer("rollout"): …` adds to the metric `time/rollout`. Spans can be nested and repeated;
    a span includes the spans inside it. `on_enter` is called with the name of each new span.
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
        """Return the seconds spent in a span since the last `take`, 0 if there was none."""
        return self._seconds.get(name, 0.0)

    def times(self) -> dict[str, float]:
        """Return `time/<span>` → seconds since the last `take`."""
        return {f"time/{name}": value for name, value in self._seconds.items()}

    def take(self) -> dict[str, float]:
        """Return the same, and reset all spans."""
        taken = self.times()
        self._seconds = {}
        return taken
