"""Calls start in the order of their tickets, whatever the order in which they arrive."""

from __future__ import annotations

import asyncio
import time

import pytest

from quadriga.single_controller import rank_host
from quadriga.single_controller.rank_host import CallOrder


@pytest.fixture(autouse=True)
def short_gap(monkeypatch):
    monkeypatch.setattr(rank_host, "GAP_S", 0.2)


class Calls:
    """Calls that record the order in which they start. `fails`: tickets of calls that raise."""

    def __init__(self, fails=()):
        self.order, self.started, self.fails = CallOrder(), [], fails

    async def call(self, ticket, seconds=0.0):
        async with self.order.turn(ticket):
            await asyncio.sleep(seconds)
            self.started.append(ticket)
            if ticket in self.fails:
                raise ValueError


def run(arrivals, fails=()):
    """Return the order in which calls start that arrive in the given order."""
    calls = Calls(fails)

    async def all_of_them():
        tasks = [calls.call(ticket) for ticket in arrivals]
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=60)

    asyncio.run(all_of_them())
    return calls.started


def test_calls_start_in_the_order_of_their_tickets():
    assert run([("a", 2), ("a", 0), ("a", 1)]) == [("a", 0), ("a", 1), ("a", 2)]


def test_senders_do_not_wait_for_each_other_and_a_call_without_a_ticket_never_waits():
    started = run([("a", 1), None, ("b", 0), ("a", 0)])
    assert started.index(("a", 0)) < started.index(("a", 1))
    assert started[0] is None and started[1] == ("b", 0)


def test_the_turn_of_a_call_that_fails_ends():
    assert run([("a", 1), ("a", 0)], fails=[("a", 0)]) == [("a", 0), ("a", 1)]


def test_a_call_that_is_cancelled_while_it_waits_is_skipped():
    calls = Calls()

    async def cancel_the_second():
        tasks = [asyncio.create_task(calls.call(("a", i), 0.05)) for i in range(4)]
        await asyncio.sleep(0.01)
        tasks[1].cancel()
        tasks[2].cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=60)

    asyncio.run(cancel_the_second())
    assert calls.started == [("a", 0), ("a", 3)]


def test_the_turn_of_a_call_that_is_cancelled_while_it_runs_ends():
    calls = Calls()

    async def cancel_the_first():
        tasks = [asyncio.create_task(calls.call(("a", i), 0.05)) for i in range(2)]
        await asyncio.sleep(0.01)
        tasks[0].cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=60)

    asyncio.run(cancel_the_first())
    assert calls.started == [("a", 1)]


def test_calls_that_never_arrive_are_skipped_and_start_at_once_if_they_arrive_late(monkeypatch):
    calls = Calls()

    async def without_0_and_3():
        tasks = [asyncio.create_task(calls.call(("a", i))) for i in (4, 2, 1)]
        await asyncio.sleep(0.1)
        assert calls.started == []
        await asyncio.wait_for(asyncio.gather(*tasks), timeout=60)
        monkeypatch.setattr(rank_host, "GAP_S", 600)
        await asyncio.wait_for(calls.call(("a", 0)), timeout=60)
        await asyncio.wait_for(calls.call(("a", 5)), timeout=60)

    asyncio.run(without_0_and_3())
    assert calls.started == [("a", 1), ("a", 2), ("a", 4), ("a", 0), ("a", 5)]


def test_a_call_that_a_blocked_loop_delays_is_not_skipped():
    calls = Calls()

    async def blocked():
        later = asyncio.create_task(calls.call(("a", 1)))
        await asyncio.sleep(0.01)
        time.sleep(0.5)  # more than the gap
        await asyncio.sleep(0.02)
        await calls.call(("a", 0))
        await asyncio.wait_for(later, timeout=60)

    asyncio.run(blocked())
    assert calls.started == [("a", 0), ("a", 1)]


def test_a_call_that_holds_its_turn_for_long_is_not_skipped():
    calls = Calls()

    async def long_first():
        await asyncio.gather(calls.call(("a", 0), seconds=0.5), calls.call(("a", 1)))

    asyncio.run(long_first())
    assert calls.started == [("a", 0), ("a", 1)]
