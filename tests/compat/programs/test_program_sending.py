"""Calls by name are packed for all ranks before one is sent.

tests/single_controller/test_submission.py and tests/backends/test_partly_sent.py have the rest of
`send_to_ranks`, which sends them.
"""

import threading

import pytest
import ray
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register

from quadriga.errors import DispatchError


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
