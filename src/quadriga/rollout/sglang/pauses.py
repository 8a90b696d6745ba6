"""Pauses of generation: those that a program asks for, from any thread, and those of updates."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from quadriga.errors import RolloutError
from quadriga.rollout.sglang.processes.frames import Json
from quadriga.rollout.sglang.transports import Body


class Pauses:
    """A pause lasts over weight updates and restarts, until `go_on`.

    Args:
        call: sends a request with its path and its body.

    Attributes:
        mode: of the pause that a program has asked for; None: there is none.
    """

    def __init__(self, call: Callable[[str, Body], Json]) -> None:
        self.mode: str | None = None
        self._call = call
        self._lock = threading.RLock()
        self._updating = False

    def pause(self, mode: str) -> None:
        """Let SGLang generate nothing. If it refuses, `RolloutError` is raised."""
        with self._lock:
            before, self.mode = self.mode, mode
            try:
                self._call("/pause_generation", {"mode": mode})
            except RolloutError:
                self.mode = before
                raise

    def go_on(self) -> None:
        """End the pause. An update that runs ends its own."""
        with self._lock:
            self.mode = None
            if not self._updating:
                self._call("/continue_generation", {})

    def started(self) -> None:
        """Pause an SGLang that was started again, if the one before was paused."""
        with self._lock:
            if self.mode is not None:
                self.pause(self.mode)

    @contextlib.contextmanager
    def for_update(self) -> Iterator[None]:
        """Pause within the block."""
        try:
            with self._lock:
                self._updating = True
                self._call("/pause_generation", {"mode": "retract"})
            yield
        except BaseException:
            with contextlib.suppress(RolloutError):  # the first error is the one to raise
                self._end_update()
            raise
        self._end_update()

    def _end_update(self) -> None:
        with self._lock:
            self._updating = False
            if self.mode is None:
                self._call("/continue_generation", {})
