"""Starting calls in the order in which they were sent, where they may arrive in another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

Ticket = tuple[str, int]
"""Who sent a call, and its number among that sender's calls to this rank, from 0."""


class CallOrder:
    """Consumes: calls with tickets. Waits for: the ticket before, of the same sender, to have had
    its turn. Unblocked by: its end, whatever became of that call.

    A call without a ticket never waits.
    """

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}

    @contextlib.asynccontextmanager
    async def turn(self, ticket: Ticket | None) -> AsyncIterator[None]:
        """Hold the turn of `ticket` for the length of the block."""
        if ticket is None:
            yield
            return
        sender, number = ticket
        if self._next.setdefault(sender, 0) != number:
            self._waiting[ticket] = asyncio.get_running_loop().create_future()
            await self._waiting[ticket]
        try:
            yield
        finally:
            self._next[sender] = number + 1
            following = self._waiting.pop((sender, number + 1), None)
            if following is not None and not following.done():
                following.set_result(None)
