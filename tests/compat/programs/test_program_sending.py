"""Calls by name are packed for all ranks before one is sent; all ranks have one order of calls."""

from __future__ import annotations

import threading

import pytest
import ray
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register

from quadriga.errors import DispatchError, WorkerError


class Counter(Worker):
    def __init__(self):
        super().__init__()
        self.calls = 0

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, blocking=False)
    def each(self, value):
        self.calls += 1
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count(self):
        return self.calls


@pytest.fixture
def counters(start):
    return start(Counter)


def test_no_rank_runs_if_the_argument_of_one_cannot_be_pickled(counters):
    for call in (counters.each, lambda values: counters.execute_all_async("each", values)):
        with pytest.raises(DispatchError, match=r"each: an argument cannot be sent"):
            call([1, threading.Lock()])
        assert counters.count() == [0, 0]
    assert ray.get(counters.each([1, 2])) == [1, 2]


@pytest.mark.nightly
def test_a_call_of_all_ranks_is_sent_at_once(counters):
    """Without one lock for all ranks, the calls of two threads could have two orders."""
    held, lock = [], counters._ranks.lock

    class Counted:
        def __enter__(self):
            held.append(lock.__enter__())

        def __exit__(self, *error):
            lock.__exit__(*error)

    counters._ranks.lock = Counted()
    for call in (counters.each, lambda values: counters.execute_all_async("each", values)):
        held.clear()
        assert ray.get(call([3, 4])) == [3, 4]
        assert len(held) == 1


@pytest.mark.nightly
def test_a_rank_to_which_a_call_cannot_be_sent_is_named(counters, monkeypatch):
    def refused(*sent):
        raise RuntimeError("the queue is full")

    assert ray.get(counters.each([3, 4])) == [3, 4]
    label = next(name for name in counters._ranks.handles[1].methods if "each" in name)
    monkeypatch.setitem(counters._ranks.handles[1].methods, label, refused)
    with pytest.raises(WorkerError, match=r"each could not be sent to rank 1.*queue is full.*: 0"):
        counters.each([3, 4])
