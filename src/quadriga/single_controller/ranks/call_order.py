"""Start calls in the order in which they were sent, although they may arrive in another order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

Ticket = tuple[str, int]
"""The sender of a call, and the number of the call among those of the sender to this rank."""


class CallOrder:
    """Gives each call its turn to start. Numbers start at 0 for each sender.

    Consumes: calls with tickets. Waits for: the turn of the previous ticket of the same sender to
    end. Unblocked by: the end of that turn, whether its call succeeded or failed.

    Example: a large call 0 and small calls 1 and 2 of sender "a" arrive as 1, 2, 0.

        arrives ("a", 1)    waits, because the next number of "a" is 0
        arrives ("a", 2)    waits
        arrives ("a", 0)    starts; then 1 starts; then 2 starts

    A call without a ticket never waits.
    """

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}

    @contextlib.asynccontextmanager
    async def turn(self, ticket: Ticket | None) -> AsyncIterator[None]:
        """Wait for the turn of `ticket`, and hold it inside the `async with` block."""
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
            # The next call may not have arrived yet; it then finds its number in `_next`.
            following = self._waiting.pop((sender, number + 1), None)
            if following is not None and not following.done():
                following.set_result(None)
