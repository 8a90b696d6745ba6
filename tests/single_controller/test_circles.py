"""Calls from rank to rank that come back to the first rank."""

import asyncio
import threading

import pytest

from group_fixtures import local_group
from quadriga.errors import CallTimeoutError
from quadriga.single_controller import Dispatch, Worker, register

pytestmark = pytest.mark.nightly


class Player(Worker):
    """Passes a ball to the other player, who passes it back."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def meet(self, other):
        self.other = other

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def pass_on(self, passes):
        await asyncio.sleep(0)
        if passes:
            (last,) = await self.other.pass_on.options(timeout=200).submit(passes - 1)
            return last
        return "caught"


@pytest.fixture
def players(start):
    first, second = start(Player, 1), start(Player, 1)
    first.meet(second)
    second.meet(first)
    return first, second


def test_coroutine_methods_call_each_other_in_a_circle(players):
    assert players[0].pass_on(4) == ["caught"]


def test_a_call_that_another_thread_keeps_out_ends_at_its_deadline():
    inside, end = threading.Event(), threading.Event()

    def wait():
        inside.set()
        end.wait(60)

    call = local_group(Worker, 1).execute_func_rank_zero
    thread = threading.Thread(target=call, args=(wait,))
    thread.start()
    try:
        assert inside.wait(60)
        with pytest.raises(CallTimeoutError, match=r"func_rank_zero .* before it started"):
            call.options(timeout=0.1)(int)
    finally:
        end.set()
        thread.join(60)
    assert call(int) == 0
