"""Start calls in the order in which they were sent, although they may arrive in another order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

Ticket = tuple[str, int]
"""The sender of a call, and the number of the call among those of the sender to this rank."""

GAP_S = 2.0
"""A call that has not arrived after this time is lost: it was cancelled before it was sent."""
CHECKS = 20
"""How often an event loop must run in that time."""


@dataclass
class _Sender:
    """The calls of one sender."""

    next: int = 0
    """The lowest number whose turn has not ended."""
    present: set[int] = field(default_factory=set)
    """Numbers that wait for their turn or hold it."""
    ended: set[int] = field(default_factory=set)
    """Numbers above `next` whose turn has ended, because they were cancelled while they waited."""
    waiting: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    """Number → the future whose result starts its turn."""
    watch: asyncio.Task[None] | None = None
    """The task that skips lost calls, while calls wait."""


class CallOrder:
    """Gives each call its turn to start. Numbers start at 0 for each sender.

    Consumes: calls with tickets. Waits for: the turn of the previous ticket of the same sender to
    end. Unblocked by: the end of that turn, whether its call succeeded, failed or was cancelled; or
    by `GAP_S` seconds in which the previous call does not arrive.

    Example: a large call 0 and small calls 1 and 2 of sender "a" arrive as 1, 2, 0.

        arrives ("a", 1)    waits, because the next number of "a" is 0
        arrives ("a", 2)    waits
        arrives ("a", 0)    starts; then 1 starts; then 2 starts

    If call 0 was cancelled before it was sent, 1 starts after `GAP_S` seconds. If 0 arrives after
    that nevertheless, it starts at once. A call without a ticket never waits.
    """

    def __init__(self) -> None:
        self._senders: dict[str, _Sender] = {}

    @contextlib.asynccontextmanager
    async def turn(self, ticket: Ticket | None) -> AsyncIterator[None]:
        """Wait for the turn of `ticket`, and hold it inside the `async with` block."""
        if ticket is None:
            yield
            return
        name, number = ticket
        sender = self._senders.setdefault(name, _Sender())
        sender.present.add(number)
        try:
            if number > sender.next:
                await _wait(sender, number)
            yield
        finally:  # also if this call is cancelled while it waits
            sender.present.discard(number)
            sender.waiting.pop(number, None)
            sender.ended.add(number)
            _advance(sender)


async def _wait(sender: _Sender, number: int) -> None:
    turn = sender.waiting[number] = asyncio.get_running_loop().create_future()
    if sender.watch is None or sender.watch.done():
        # The sender holds the task: the loop itself keeps only a weak reference to it.
        sender.watch = asyncio.create_task(_skip_lost_calls(sender))
    await turn


def _advance(sender: _Sender) -> None:
    """Move past the turns that have ended, and start the call whose turn it is."""
    while sender.next in sender.ended:
        sender.next += 1
    # What remains below `next` are calls that arrived after they had been skipped.
    sender.ended = {number for number in sender.ended if number > sender.next}
    turn = sender.waiting.get(sender.next)
    if turn is not None and not turn.done():
        turn.set_result(None)


async def _skip_lost_calls(sender: _Sender) -> None:
    """Skip a number that does not arrive while calls with higher numbers wait.

    A method that blocks the loop for a minute also keeps calls from arriving. Time is therefore
    counted in short sleeps: when the loop runs again, most of them are still to come, and the calls
    that have queued meanwhile arrive before the last of them ends.
    """
    lost, checks = -1, 0
    while sender.waiting:
        await asyncio.sleep(GAP_S / CHECKS)
        if sender.next in sender.present:
            lost = -1
        elif sender.next != lost:
            lost, checks = sender.next, 1
        elif checks < CHECKS:
            checks += 1
        elif sender.waiting:
            sender.next = min(sender.waiting)
            _advance(sender)
