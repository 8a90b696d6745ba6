"""A future that many ranks receive is split by one of them."""

import pytest
import ray
from worker_cases import prompts

from quadriga.backends.ray import calls
from quadriga.backends.ray.calls import pending_of, split_futures
from quadriga.errors import LengthError, WorkerMethodError
from quadriga.protocol import DataProtoFuture
from quadriga.single_controller.backend import RankFacts, RankHandle
from quadriga.single_controller.dispatch import Call


@pytest.fixture
def always(monkeypatch):
    """Split every future, also for two ranks."""
    monkeypatch.setattr(calls, "MANY", 0)


def test_each_rank_receives_its_rows_or_the_value_that_is_no_batch(ray_cases, always):
    makers = readers = ray_cases
    made = makers.make_odd_twice.submit(prompts(4))  # 0 1 1 2 3 3
    expected = [([0, 10, 10], [0.0, 1.0, 1.0]), ([20, 30, 30], [2.0, 3.0, 3.0])]
    assert readers.received(made) == [("DataProto", rows) for rows in expected]
    again = readers.received(makers.make_odd_twice.submit(prompts(4)), other=made)
    assert again == [("DataProto", rows, rows) for rows in expected]
    whole = readers.whole(makers.make_odd_twice.submit(prompts(4)))
    assert whole == [[0, 10, 10, 20, 30, 30]] * 2
    half = makers.make_odd_twice.submit(prompts(8)).chunk(2)[1]  # 4 5 5 6 7 7
    assert [found[1][0] for found in readers.received(half)] == [[40, 50, 50], [60, 70, 70]]
    for value in (7, None, "text", b"bytes", (1, 2)):
        assert readers.same(makers.same.submit(value)) == [[value, value]] * 2
    one = DataProtoFuture(makers.same.submit(b"bytes").pending, _first)
    assert readers.same(one) == [b"bytes"] * 2


def test_a_part_of_a_value_that_is_no_batch_is_refused_by_type(ray_cases, monkeypatch):
    for many in (0, 256):
        monkeypatch.setattr(calls, "MANY", many)
        with pytest.raises(WorkerMethodError, match=r"a part of a future.*got list"):
            ray_cases.received(ray_cases.same.submit(7))


def _first(results):
    return results[0]


def test_a_method_that_wants_the_future_gets_it(ray_cases, always):
    assert ray_cases.future(ray_cases.make_odd_twice.submit(prompts(4))) == [2, 2]


def test_a_length_that_does_not_divide_is_an_error_of_the_call(ray_cases, always):
    with pytest.raises(WorkerMethodError, match="3 rows do not divide into 2") as caught:
        ray_cases.received(ray_cases.make_odd_twice.submit(prompts(2)))
    assert isinstance(caught.value.__cause__, LengthError)


def test_the_references_in_the_calls_are_linear_in_the_ranks(monkeypatch):
    """64 receivers of 64 results: each call has one reference, the task of the split has 64."""
    sent = []

    class Method:
        def options(self, name, num_returns):
            assert (name, num_returns) == ("role.take: split", 64)
            return self

        def remote(self, splits):
            sent.extend(splits)
            return [ray.ObjectRef(bytes([i]) * 28) for i in range(64)]

    class Native:
        quadriga_split = Method()

    facts = RankFacts(0, 64, "10.0.0.1", 1, "10.0.0.1", "1")
    handles = [RankHandle(Native(), "rank", facts)] * 64
    future = DataProtoFuture([pending_of(ray.ObjectRef(bytes([i]) * 28), "") for i in range(64)])
    parts = future.chunk(64)
    calls = split_futures(handles, [Call("role", "take", (part, 7)) for part in parts])
    assert [len(call.args[0].pending) for call in calls] == [1] * 64
    assert [call.args[1] for call in calls] == [7] * 64
    assert [len(whole.pending) for whole, _ in sent] == [64]
    few = [Call("role", "take", (part,)) for part in future.chunk(3)]
    assert split_futures(handles, few) == few
