"""A generator method that runs in a rank, one item per call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Generator

from quadriga.errors import DispatchError

Item = tuple[object, ...]
"""A tuple of one item, an empty tuple at the end."""


class OpenStream:
    """A generator, plain or asynchronous, that was started and has not ended."""

    def __init__(self, generator: object) -> None:
        if not isinstance(generator, Generator | AsyncGenerator):
            raise DispatchError(
                f"A generator was expected, the method returned {type(generator).__name__}."
            )
        self._generator: Generator[object] | AsyncGenerator[object] = generator
        self._lock: asyncio.Lock | None = None

    def step(self) -> Item | Awaitable[Item]:
        """Return the next item, or an awaitable of it for an asynchronous generator."""
        if isinstance(self._generator, AsyncGenerator):
            return self._step_later(self._generator)
        try:
            return (next(self._generator),)
        except StopIteration:
            return ()

    async def _step_later(self, generator: AsyncGenerator[object]) -> Item:
        # The controller asks for one item ahead, and a generator runs one `__anext__` at a time.
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:
            try:
                return (await anext(generator),)
            except StopAsyncIteration:
                return ()

    def close(self) -> Awaitable[None] | None:
        """End the generator: its `finally` blocks run."""
        if isinstance(self._generator, AsyncGenerator):
            return self._close_later(self._generator)
        self._generator.close()
        return None

    async def _close_later(self, generator: AsyncGenerator[object]) -> None:
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:  # not while an item is computed
            await generator.aclose()
