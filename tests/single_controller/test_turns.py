"""Calls that arrive in another order than they were sent start in the order of their tickets."""

from __future__ import annotations

import asyncio

from quadriga.single_controller.ranks.call_order import CallOrder


def run(arrivals, fails=()):
    """In which order calls start that arrive in the given one; some raise in their turn."""
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


def test_the_order_of_tickets():
    assert run([("a", 2), ("a", 0), ("a", 1)]) == [("a", 0), ("a", 1), ("a", 2)]


def test_senders_do_not_wait_for_each_other_and_a_call_without_a_ticket_for_nobody():
    started = run([("a", 1), None, ("b", 0), ("a", 0)])
    assert started.index(("a", 0)) < started.index(("a", 1))
    assert started[0] is None and started[1] == ("b", 0)


def test_a_call_that_fails_hands_its_turn_on():
    assert run([("a", 1), ("a", 0)], fails=[("a", 0)]) == [("a", 0), ("a", 1)]
