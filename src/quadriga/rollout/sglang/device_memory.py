"""Device memory that SGLang releases while the trainer needs it. Without a GPU nothing is freed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quadriga.rollout.sglang.processes.frames import Json
from quadriga.rollout.sglang.transports import Body

_WEIGHTS, _REST = ("weights",), ("kv_cache", "cuda_graph")
"""Kinds of device memory, as SGLang names them."""


class DeviceMemory:
    """Releases the memory and gets it back, the weights before the rest.

    Args:
        call: sends a request with its path and its body.
    """

    def __init__(self, call: Callable[[str, Body], Json]) -> None:
        self._call = call
        self._released: frozenset[str] = frozenset()

    def started(self) -> None:
        """Note that SGLang was started again, and has all its memory."""
        self._released = frozenset()

    def release(self) -> None:
        """Release all of it that is not released."""
        tags = [tag for tag in (*_WEIGHTS, *_REST) if tag not in self._released]
        if tags:
            self._call("/release_memory_occupation", {"tags": list(tags)})
            self._released = frozenset((*_WEIGHTS, *_REST))

    def resume(self) -> None:
        """Get all of it back."""
        self._resume((*_WEIGHTS, *_REST))

    def resume_weights(self) -> None:
        """Get the memory of the weights back, but not that of keys and values."""
        self._resume(_WEIGHTS)

    def _resume(self, tags: Sequence[str]) -> None:
        missing = [tag for tag in tags if tag in self._released]
        if missing:
            self._call("/resume_memory_occupation", {"tags": list(missing)})
            self._released -= frozenset(missing)
