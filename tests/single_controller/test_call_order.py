"""Calls start in the order of their tickets, whatever the order in which they arrive."""

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

    def __init__(self, fails=(), seconds=0.0):
        self.order, self.started, self.fails, self.seconds = CallOrder(), [], fails, seconds

    async def call(self, ticket):
        async with self.order.turn(ticket):
            await asyncio.sleep(self.seconds)
            self.started.append(ticket)
            if ticket in self.fails:
                raise ValueError

    def run(self, *arrivals, cancel=()):
        """Return the order in which calls start that arrive in the given order."""

        async def all_of_them():
            tasks = [asyncio.create_task(self.call(ticket)) for ticket in arrivals]
            await asyncio.sleep(0.01)
            for number in cancel:
                tasks[number].cancel()
            await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=60)

        asyncio.run(all_of_them())
        return self.started


def a(*tickets):
    return [("a", ticket) for ticket in tickets]


def test_calls_start_in_the_order_of_their_tickets():
    assert Calls().run(*a(2, 0, 1)) == a(0, 1, 2)


def test_senders_do_not_wait_for_each_other_and_a_call_without_a_ticket_never_waits():
    started = Calls().run(("a", 1), None, ("b", 0), ("a", 0))
    assert started.index(("a", 0)) < started.index(("a", 1))
    assert started[0] is None and started[1] == ("b", 0)


def test_the_turn_of_a_call_that_fails_ends():
    assert Calls(fails=a(0)).run(*a(1, 0)) == a(0, 1)


def test_the_turn_of_a_call_that_is_cancelled_ends_while_it_waits_and_while_it_runs():
    assert Calls(seconds=0.05).run(*a(0, 1, 2, 3), cancel=[1, 2]) == a(0, 3)
    assert Calls(seconds=0.05).run(*a(0, 1), cancel=[0]) == a(1)


def test_calls_that_never_arrive_are_skipped_and_start_at_once_if_they_arrive_late(monkeypatch):
    calls = Calls()

    async def without_0_and_3():
        tasks = [asyncio.create_task(calls.call(ticket)) for ticket in a(4, 2, 1)]
        await asyncio.sleep(0.1)
        assert calls.started == []
        await asyncio.wait_for(asyncio.gather(*tasks), timeout=60)
        monkeypatch.setattr(rank_host, "GAP_S", 600)
        for ticket in a(0, 5):
            await asyncio.wait_for(calls.call(ticket), timeout=60)

    asyncio.run(without_0_and_3())
    assert calls.started == a(1, 2, 4, 0, 5)


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
    assert calls.started == a(0, 1)


def test_a_call_that_holds_its_turn_for_long_is_not_skipped():
    assert Calls(seconds=0.5).run(*a(0, 1)) == a(0, 1)
