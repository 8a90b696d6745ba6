"""Calls that are sent to several ranks: all or none, in one order, from any thread and process."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import ray
import torch

from group_fixtures import Starter
from quadriga.errors import DispatchError
from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, Worker, register

BALLAST = np.zeros(2**18)
"""An argument of 2 MiB, above what Ray sends inside a call."""
FIELDS = DataProto.from_dict({f"field {i}": torch.zeros(1, 2**13) for i in range(16)})
"""A batch of 512 KiB, of which each field is small enough to be sent inside the call."""


class Recorder(Worker):
    """Records what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def record(self, value, *ballast):
        self.seen.append(value)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def record_each(self, value):
        self.seen.append(value)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def recorded(self):
        seen, self.seen = self.seen, []
        return seen

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def what(self, value, nested=None):
        return value, type(nested[0]).__name__ if nested else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def call_other(self, group, values):
        """Call another group from this process."""
        return [group.record(value).get() for value in values]


class Interleaver(Recorder):
    """The same, with coroutine methods."""

    def __init__(self) -> None:
        super().__init__()
        self.running = self.most = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def record_later(self, value, *ballast, seconds=0.0):
        self.seen.append(value)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(seconds)
        self.running -= 1
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def most_running(self):
        return self.most


@pytest.fixture(
    scope="module",
    params=[pytest.param(Recorder, marks=pytest.mark.nightly), Interleaver],
    ids=["plain", "coroutines"],
)
def recorders(request, ray_backend):
    start = Starter(ray_backend)
    yield start(request.param, 2, timeout=60)
    start.end()


@pytest.fixture
def group(recorders):
    """Two ranks that have recorded nothing."""
    recorders.recorded()
    return recorders


class RaisesWhenPickled:
    def __reduce__(self):
        raise ValueError("planted")


@pytest.mark.parametrize("wrong", [threading.Lock, RaisesWhenPickled], ids=["lock", "raises"])
def test_no_rank_runs_if_an_argument_of_one_rank_cannot_be_pickled(group, wrong):
    with pytest.raises(DispatchError, match=r"record_each: an argument cannot be sent"):
        group.record_each([[1], wrong()])
    with pytest.raises(DispatchError, match=r"record: an argument cannot be sent"):
        group.record([BALLAST, wrong()])  # all ranks get it, so it is put into the store
    assert group.recorded() == [[]] * 2
    group.record_each([1, 2])
    assert group.recorded() == [[1], [2]]


def test_ranks_with_the_same_arguments_have_one_encoding(group, monkeypatch):
    from quadriga.backends.ray import calls

    made, encode = [], calls.encode
    monkeypatch.setattr(calls, "encode", lambda *call: made.append(call) or encode(*call))
    group.record(FIELDS.select()).get()
    assert len(made) == 1
    group.record_each([1, 2])
    assert len(made) == 3


def test_threads_send_their_calls_to_all_ranks_in_one_order(group):
    def send(thread):
        return [group.record((thread, i), *[BALLAST, FIELDS][: i % 3]) for i in range(25)]

    with ThreadPoolExecutor(4) as pool:
        futures = [future for sent in pool.map(send, range(4)) for future in sent]
    for future in futures:
        future.get()
    seen = group.recorded()
    assert sorted(seen[0]) == [(thread, i) for thread in range(4) for i in range(25)]
    assert seen == [seen[0]] * 2
    for thread in range(4):
        assert [i for t, i in seen[0] if t == thread] == list(range(25))


def test_a_reference_to_an_object_arrives_as_the_object(group):
    double = ray.remote(num_cpus=0)(lambda x: 2 * x)
    reference = ray.put(5)
    assert group.what(reference) == [(5, None)] * 2
    assert group.what(value=double.remote(reference)) == [(10, None)] * 2
    assert group.what(1, nested=[reference]) == [(1, "ObjectRef")] * 2
    array = group.what(ray.put(BALLAST))[0][0]
    assert array.shape == BALLAST.shape


@pytest.mark.nightly
def test_a_group_that_was_sent_to_another_process_is_called_from_both(group, start_on_ray):
    group.start_worker_aliveness_check(5.0)  # its thread stays in this process
    other = start_on_ray(Recorder, 1)
    called = other.call_other.submit(group, ["b0", "b1", "b2"])
    for i in range(3):
        group.record(f"a{i}").get()
    assert called.get() == [[[None] * 2] * 3]
    group.record("a3").get()
    assert other.call_other(group, ["b3"]) == [[[None] * 2]]
    for seen in group.recorded():
        assert [value for value in seen if value[0] == "a"] == ["a0", "a1", "a2", "a3"]
        assert [value for value in seen if value[0] == "b"] == ["b0", "b1", "b2", "b3"]
    group.stop_worker_aliveness_check()


def test_cancelled_calls_keep_no_other_call_waiting(group):
    if not hasattr(group, "record_later"):
        pytest.skip("calls of these ranks do not interleave")
    group.record("first").get()
    for _ in range(2):
        futures = [group.record_later(i, seconds=0.02) for i in range(12)]
        for i in (3, 4, 11):
            for pending in futures[i].pending:
                ray.cancel(pending.ref)
        assert futures[10].get() == [10, 10]
        assert group.record_later("after").get() == ["after", "after"]


@pytest.mark.nightly
@pytest.mark.parametrize("limit", [1, 2])
def test_small_calls_that_overtake_a_large_one_leave_it_room(limit, start_on_ray):
    limited = start_on_ray(Interleaver, 2, actor={"max_concurrency": limit}, timeout=30)
    futures = []
    for i in range(3):
        futures.append(limited.record_later(("large", i), FIELDS, seconds=0.01))
        futures += [limited.record_later(("small", i, j), seconds=0.01) for j in range(8)]
    for future in futures:
        future.get()
    order = [("large", i) if j < 0 else ("small", i, j) for i in range(3) for j in range(-1, 8)]
    assert limited.recorded() == [order, order]
    assert max(limited.most_running()) <= limit


class Shutdown(Worker):
    """Has a method with the name of a method of the group."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def shutdown(self): ...


def test_a_reserved_name_is_refused_before_any_worker_is_built(backend, monkeypatch):
    for builds in ("ray.backend.start_ranks", "local._build"):
        monkeypatch.setattr(f"quadriga.backends.{builds}", None)
    pool, cls = backend.resource_pool([1], use_gpu=False), backend.class_with_args(Shutdown)
    for held in (cls, backend.colocate({"a": cls})):
        with pytest.raises(DispatchError, match="a worker group has 'shutdown' itself"):
            backend.worker_group(pool, held)
