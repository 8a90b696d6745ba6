"""Calls start in the order of their tickets, whatever the order in which they arrive."""

from __future__ import annotations

import asyncio

from quadriga.single_controller.ranks.call_order import CallOrder


def run(arrivals, fails=()):
    """Return the order in which calls start that arrive in the given order. Some of them raise."""
    started = []

    async def call(turns, ticket):
        async with turns.turn(ticket):
            await asyncio.sleep(0)
            started.append(ticket)
            if ticket in fails:
                raise ValueError

    async def all_of_them():
        turns = CallOrder()
        calls = [call(turns, ticket) for ticket in arrivals]
        await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), timeout=5)

    asyncio.run(all_of_them())
    return started


def test_calls_start_in_the_order_of_their_tickets():
    assert run([("a", 2), ("a", 0), ("a", 1)]) == [("a", 0), ("a", 1), ("a", 2)]


def test_senders_do_not_wait_for_each_other_and_a_call_without_a_ticket_never_waits():
    started = run([("a", 1), None, ("b", 0), ("a", 0)])
    assert started.index(("a", 0)) < started.index(("a", 1))
    assert started[0] is None and started[1] == ("b", 0)


def test_the_turn_of_a_call_that_fails_ends():
    assert run([("a", 1), ("a", 0)], fails=[("a", 0)]) == [("a", 0), ("a", 1)]
