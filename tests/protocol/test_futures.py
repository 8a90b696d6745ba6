"""Futures: waiting with a limit, in an event loop, in the order of completion; cancelling."""

from __future__ import annotations

import asyncio
import threading
from typing import ClassVar

import pytest
import torch
from protocol_cases import Done

from processes import run_python
from quadriga.errors import CallTimeoutError, ProtocolError
from quadriga.protocol import DataProto, DataProtoFuture, as_completed
from quadriga.protocol.boundary import wait_for_arguments
from quadriga.protocol.threads import PendingValue


def batch(n: int = 4) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(n)})


class Later(PendingValue):
    """A pending result that exists once `end` is called."""

    def __init__(self, value: object = None) -> None:
        self.value, self.cancelled, self.ended = value, False, threading.Event()

    def end(self) -> Later:
        self.ended.set()
        return self

    def done(self) -> bool:
        return self.ended.is_set()

    def cancel(self) -> bool:
        self.cancelled = not self.done()
        return self.cancelled

    def result(self) -> object:
        assert self.ended.wait(60)
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Together(Later):
    """A pending result that exists when all results of the barrier are waited for."""

    def __init__(self, value: object, barrier: threading.Barrier) -> None:
        super().__init__(value)
        self.barrier = barrier

    def result(self) -> object:
        if not self.done():
            self.barrier.wait()
        return self.end().value


def test_get_with_a_limit_raises_and_may_be_called_again():
    late = Later(batch())
    future = DataProtoFuture([Later(batch()).end(), late])
    with pytest.raises(CallTimeoutError, match=r"no result in time.*goes on"):
        future.get(timeout=0.05)
    assert not future.done()
    late.end()
    assert len(future.get(timeout=60)) == 8 and future.done()
    assert len(DataProtoFuture([Done(batch())]).get(timeout=0.1)) == 4


def test_futures_are_yielded_in_the_order_in_which_they_end():
    parts = [Later(batch()), Later(ValueError("worker")), Later(batch())]
    futures = [DataProtoFuture([part]) for part in parts]
    ended = as_completed(futures, timeout=60)
    for number in (2, 1, 0):
        parts[number].end()
        assert next(ended) is futures[number]
    assert list(ended) == []
    with pytest.raises(ValueError, match="worker"):
        futures[1].get()
    with pytest.raises(CallTimeoutError, match=r"1 futures have no result after 0\.05 s"):
        list(as_completed([futures[2], DataProtoFuture([Later()])], timeout=0.05))


@pytest.mark.parametrize("timeout", [-1, float("nan"), True, "3"])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(timeout):
    with pytest.raises(ProtocolError, match=r"timeout: expected a number of seconds"):
        DataProtoFuture([]).get(timeout=timeout)


class Recorded(PendingValue):
    """A pending value that records with which others it is waited for."""

    waits: ClassVar[list[int]] = []

    def result(self):
        raise AssertionError("waited for by itself")

    @staticmethod
    def wait_all(pendings, timeout=None):
        Recorded.waits.append(len(pendings))


def test_futures_deep_inside_arguments_are_waited_for_together():
    """One that fails must end the wait for one that never returns."""
    first, second, third = (DataProtoFuture([Recorded()]) for _ in range(3))
    wait_for_arguments([{"parts": [first, (second,)]}, [{"last": third}]])
    assert Recorded.waits == [3]


def test_a_program_that_has_given_up_an_awaited_future_ends():
    """Python itself waits for the threads of its executors when a process ends."""
    code = (
        "import asyncio, threading\n"
        "from quadriga.protocol.threads import in_thread\n"
        "try:\n"
        "    asyncio.run(asyncio.wait_for(in_thread(threading.Event().wait), 0.1))\n"
        "except TimeoutError:\n"
        "    print('given up')\n"
    )
    assert run_python("-c", code, timeout=60).stdout == "given up\n"


def test_any_number_of_futures_is_awaited_at_the_same_time():
    barrier = threading.Barrier(80, timeout=60)

    async def wait_for_all():
        futures = [DataProtoFuture([Together(batch(n + 1), barrier)]) for n in range(80)]
        return await asyncio.gather(*futures), await futures[3].chunk(4)[0]

    found, part = asyncio.run(wait_for_all())
    assert [len(data) for data in found] == list(range(1, 81)) and len(part) == 1
