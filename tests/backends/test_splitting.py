"""A future that many ranks receive is split by one of them."""

from __future__ import annotations

import pytest
import ray
import torch
from worker_cases import Taking, Unequal

from quadriga.backends.ray import submission
from quadriga.backends.ray.submission import split_futures
from quadriga.backends.ray.waiting import RayPending
from quadriga.compat.verl.controller.decorator import DataProtoFuture as FutureOfVerl
from quadriga.errors import LengthError, WorkerMethodError
from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.single_controller import Dispatch, Worker, register
from quadriga.single_controller.backend import RankFacts, RankHandle
from quadriga.single_controller.call import Call

WIDTH = 16_384
"""Columns of float32: 64 KiB a row, so that the two rows of a rank are stored."""


class Rows(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def make(self, data: DataProto) -> DataProto:
        """Return the rows of `data`, those of odd numbers twice, and a large field."""
        row = data.batch["row"].repeat_interleave(1 + data.batch["row"] % 2)
        return DataProto.from_dict({"row": row, "x": row[:, None].expand(-1, WIDTH).float()})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def rows(self, data: DataProto, other: DataProto | None = None) -> tuple[object, ...]:
        """Return what arrived."""
        others = [] if other is None else [other]
        found = [(d.batch["row"].tolist(), d.batch["x"][:, -1].tolist()) for d in (data, *others)]
        return type(data).__name__, *found

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whole(self, data: DataProto) -> list[int]:
        return data.batch["row"].tolist()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def same(self, value: object) -> object:
        return value

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC, materialize_futures=False)
    def future(self, data: DataProtoFuture) -> int:
        return len(data.pending)


class AsyncRows(Rows):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    async def rows(self, data: DataProto, other: DataProto | None = None) -> tuple[object, ...]:
        return Rows.rows(self, data, other)


@pytest.fixture
def always(monkeypatch):
    """Split every future, also for two ranks."""
    monkeypatch.setattr(submission, "MANY", 0)


@pytest.fixture(scope="module")
def groups(ray_backend):
    """`groups(cls)`: a group of two ranks, started once."""
    started = {}

    def group(cls):
        if cls not in started:
            pool = ray_backend.resource_pool([2], use_gpu=False)
            started[cls] = ray_backend.worker_group(pool, ray_backend.class_with_args(cls)), pool
        return started[cls][0]

    yield group
    for one, pool in started.values():
        one.shutdown()
        pool.release()


def prompts(n: int) -> DataProto:
    return DataProto.from_dict({"row": torch.arange(n)})


@pytest.mark.parametrize("cls", [Rows, pytest.param(AsyncRows, marks=pytest.mark.nightly)])
def test_each_rank_receives_its_rows(groups, always, cls):
    made = groups(Rows).make.submit(prompts(4))  # 0 1 1 2 3 3
    expected = [([0, 1, 1], [0.0, 1.0, 1.0]), ([2, 3, 3], [2.0, 3.0, 3.0])]
    assert groups(cls).rows(made) == [("DataProto", rows) for rows in expected]
    again = groups(cls).rows(groups(Rows).make.submit(prompts(4)), other=made)
    assert again == [("DataProto", rows, rows) for rows in expected]
    assert groups(cls).whole(groups(Rows).make.submit(prompts(4))) == [[0, 1, 1, 2, 3, 3]] * 2
    half = groups(Rows).make.submit(prompts(8)).chunk(2)[1]  # 4 5 5 6 7 7
    assert [found[1][0] for found in groups(cls).rows(half)] == [[4, 5, 5], [6, 7, 7]]


@pytest.mark.parametrize("cls", [Rows, AsyncRows])
def test_every_rank_receives_the_whole_value_of_a_future_that_is_no_batch(groups, always, cls):
    rows = groups(Rows)
    for value in (7, None, "text", b"bytes", (1, 2)):
        assert groups(cls).same(rows.same.submit(value)) == [[value, value]] * 2
    one = DataProtoFuture(rows.same.submit(b"bytes").pending, _first)
    assert groups(cls).same(one) == [b"bytes"] * 2


def test_a_part_of_a_value_that_is_no_batch_is_refused_by_type(groups, always, monkeypatch):
    for many in (0, 256):
        monkeypatch.setattr(submission, "MANY", many)
        with pytest.raises(WorkerMethodError, match=r"a part of a future.*got list"):
            groups(Rows).rows(groups(Rows).same.submit(7))


def test_futures_with_one_result_and_different_joins_are_split_apart(groups, always):
    made = groups(Rows).make.submit(prompts(2))  # 0, 1 1
    both = [DataProtoFuture(made.pending, join) for join in (_first, _last)]
    parts = [future.chunk(1)[0] for future in both]
    assert groups(Rows).same(parts[0])[1].batch["row"].tolist() == [0]
    calls = [Call("rows", "same", tuple(parts))] * 2
    handles = groups(Rows)._ranks.handles
    first, last = split_futures(handles, calls)[0].args
    assert [f.get().batch["row"].tolist() for f in (first, last)] == [[0], [1, 1]]


def test_a_future_of_verl_keeps_the_function_of_its_value(groups, always):
    made = groups(Rows).make.submit(prompts(4))  # 0 1 1 2 3 3
    refs = [ray.put(result) for result in made.get().chunk(2)]
    future = FutureOfVerl(DataProto.concat, refs, _reversed)
    received = groups(Rows).rows(future)
    assert [rows for _, (rows, _) in received] == [[3, 3, 2], [1, 1, 0]]


def _first(results):
    return results[0]


def _last(results):
    return results[-1]


def _reversed(batch):
    return batch[torch.arange(len(batch) - 1, -1, -1)]


def test_a_method_that_wants_the_future_gets_it(groups, always):
    assert groups(Rows).future(groups(Rows).make.submit(prompts(4))) == [2, 2]


def test_a_length_that_does_not_divide_is_an_error_of_the_call(groups, always):
    with pytest.raises(WorkerMethodError, match="3 rows do not divide into 2") as caught:
        groups(Rows).rows(groups(Rows).make.submit(prompts(2)))
    assert isinstance(caught.value.__cause__, LengthError)


@pytest.mark.parametrize("failing_first", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_the_first_failure_ends_the_wait_for_every_future(
    ray_backend, groups, always, failing_first
):
    pools = [ray_backend.resource_pool([2], use_gpu=False) for _ in range(2)]
    cls = ray_backend.class_with_args(Unequal)
    first, second = (ray_backend.worker_group(pool, cls, role="unequal") for pool in pools)
    try:
        futures = [first.make.submit(prompts(4), fails=1), second.make.submit(prompts(4))]
        if not failing_first:
            futures.reverse()
        with pytest.raises(WorkerMethodError, match="reward_model"):
            groups(Taking).take.options(timeout=150)(*futures)
    finally:
        for group in (first, second):
            group.shutdown()
        for pool in pools:
            pool.release()


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
    future = DataProtoFuture([RayPending(ray.ObjectRef(bytes([i]) * 28)) for i in range(64)])
    parts = future.chunk(64)
    calls = split_futures(handles, [Call("role", "take", (part, 7)) for part in parts])
    assert [len(call.args[0].pending) for call in calls] == [1] * 64
    assert [call.args[1] for call in calls] == [7] * 64
    assert [len(whole.pending) for whole, _ in sent] == [64]
    few = [Call("role", "take", (part,)) for part in future.chunk(3)]
    assert split_futures(handles, few) == few
