"""The data plane through worker groups on both backends, and through processes of Ray."""

import asyncio
import copy
import gc
import pickle
import sys
import time

import numpy as np
import pytest
import ray
import torch
from plane_workers import WIDTH, Plane
from protocol_cases import ARRAYS, TENSORS, same_value
from tensordict import NonTensorData, NonTensorStack, TensorDict

from group_fixtures import local_group
from quadriga.backends.ray.store import RayStore
from quadriga.containment import import_file
from quadriga.errors import CallTimeoutError, LostObjectError, WorkerMethodError
from quadriga.protocol import DataProto, as_completed, message
from quadriga.protocol.boundary import pack_argument
from quadriga.protocol.columns import encode
from quadriga.protocol.contents import RemoteBatch
from quadriga.protocol.storage import traffic
from quadriga.protocol.values import object_array

BIG_ROW = 4 * WIDTH


@pytest.fixture(scope="module", params=[pytest.param("shards", marks=pytest.mark.nightly), "rows"])
def groups(request, plane_backends):
    """Return `groups(backend, ranks)`: one group each, shared by all tests.

    All tests run with both stores of Ray: readers have rows cut out of shards, or (nightly) map
    whole shards.
    """
    started, pools = {}, []

    def group(backend: str, ranks: int):
        if (backend, ranks) not in started:
            rows = request.param == "rows" and backend == "ray"
            host = plane_backends["rows" if rows else backend]
            pools.append(pool := host.resource_pool([ranks], use_gpu=False))
            started[backend, ranks] = host.worker_group(pool, host.class_with_args(Plane))
        return started[backend, ranks]

    yield group
    for one in started.values():
        one.shutdown()
    for pool in pools:
        getattr(pool, "release", lambda: None)()


@pytest.fixture(params=["local", "ray"])
def backend(request):
    return request.param


def prompts(n: int) -> DataProto:
    return DataProto.from_dict({"row": torch.arange(n)})


def test_results_stay_in_the_store_of_the_ranks_that_produced_them(groups, backend):
    group = groups(backend, 4)
    traffic.reset()
    data = group.generate(prompts(12))
    assert isinstance(data.batch, RemoteBatch) and traffic.fetched_bytes < 4096
    if backend == "ray":
        assert sum(group.stored()) >= 12 * BIG_ROW
    data.union(group.values(data))
    data.reorder(torch.arange(11, -1, -1))
    if backend == "ray":  # local ranks count in this process
        assert traffic.fetched_bytes < 8192
    assert data.batch["small"].tolist() == [110 - 10 * i for i in range(12)]
    assert data[:2].batch["values"][:, 7].tolist() == [11.5, 10.5]
    table = {line.split()[0]: line for line in data.describe().splitlines()}
    assert "Plane[0-3] on " in table["big"] and table["big"].endswith("Plane.generate[0-3]")
    assert table["small"].endswith("local")
    assert table["values"].endswith("Plane.values[0-3]")


@pytest.mark.parametrize("readers", [3, 4])
def test_each_rank_fetches_exactly_its_rows(groups, readers):
    """4 ranks write, 3 or 4 read; the readers count the bytes."""
    data = groups("ray", 4).generate(prompts(12))
    found = groups("ray", readers).read(data, ["big"])
    share = 12 // readers
    assert found == [
        (share * BIG_ROW, [float(i) for i in range(r * share, (r + 1) * share)])
        for r in range(readers)
    ]
    data.reorder(torch.tensor([5, 0, 11, 3, 2, 1, 4, 10, 9, 8, 7, 6]))
    _, rows = groups("ray", readers).read(data, ["big"])[0]
    assert rows[:3] == [5, 0, 11]


@pytest.mark.parametrize("limit", [-1, message.INLINE_BYTES], ids=["stored", "inline"])
def test_writing_into_every_kind(groups, backend, limit, monkeypatch):
    """A worker overwrites what it received; controller and other ranks keep their values."""
    monkeypatch.setattr(message, "INLINE_BYTES", limit)
    data = DataProto.from_dict(TENSORS, ARRAYS)
    before = copy.deepcopy(data)
    made = groups(backend, 4).generate(prompts(4))
    for _ in range(2):
        for seen in groups(backend, 3).overwrite(data):
            for key, value in {**TENSORS, **ARRAYS}.items():
                assert same_value(seen[key], value), key
        for seen in groups(backend, 3).overwrite(made):  # remote fields
            assert seen["big"][:, 0].tolist() == [0, 1, 2, 3]
    for half, was in ((data.batch, before.batch), (data.non_tensor_batch, before.non_tensor_batch)):
        assert all(same_value(half[key], was[key]) for key in half.keys())  # noqa: SIM118


def test_submitted_calls_feed_each_other(groups, backend):
    """4 ranks to 3, two calls deep, without waiting: each rank fetches its rows and no more."""
    makers, readers = groups(backend, 4), groups(backend, 3)
    traffic.reset()
    made = makers.generate.submit(prompts(12))
    read = readers.read.submit(makers.values.submit(made), ["values"])
    kept = readers.read.submit(made.chunk(2)[1].chunk(1)[0], ["big"])
    found, half = read.get(), kept.get()
    assert [rows for _, rows in found] == [[r * 4 + i + 0.5 for i in range(4)] for r in range(3)]
    assert [rows for _, rows in half] == [[6, 7], [8, 9], [10, 11]]
    if backend == "ray":
        assert [n for n, _ in found] == [4 * BIG_ROW] * 3
        assert [n for n, _ in half] == [2 * BIG_ROW] * 3
        assert traffic.fetched_bytes == 0


def test_the_controller_does_not_wait_for_a_future_argument(groups, tmp_path):
    """The producer returns only after the controller has passed its result to the next call."""
    gate = tmp_path / "gate"
    made = groups("ray", 4).generate_once_file_exists.submit(prompts(12), str(gate))
    read = groups("ray", 3).read.submit(made, ["big"])
    gate.touch()
    assert [rows[0] for _, rows in read.get()] == [0, 4, 8]


def prompts_of_pairs() -> DataProto:
    """Return 8 rows of a large local field."""
    return DataProto.from_dict({"big": torch.arange(8.0)[:, None].repeat(1, WIDTH)})


def test_ranks_that_share_a_part_share_one_object(groups):
    """2 data-parallel ranks of 2 ranks each: two objects, each stored once and read by two."""
    group = groups("ray", 4)
    group.receive_in_pairs(prompts_of_pairs())
    traffic.reset()
    joined = group.receive_in_pairs(prompts_of_pairs())
    counts = traffic.reset()
    assert (counts.stored_objects, counts.stored_bytes) == (2, 8 * BIG_ROW)
    assert counts.fetched_bytes == 0
    keys, fetched = zip(*group.what_was_received(), strict=True)
    assert fetched == (4 * BIG_ROW,) * 4 and all(len(k) == 1 for k in keys)
    assert keys[0] == keys[1] and keys[2] == keys[3] and keys[0] != keys[2]
    assert joined.batch["big"][:, 0].tolist() == list(range(8))


def test_a_tensor_that_is_sent_again_unchanged_is_not_stored_again(groups):
    sent = DataProto.from_dict({"big": torch.arange(64.0)[:, None].repeat(1, WIDTH)})
    for added, stored in ((0, 2), (0, 0), (1, 2)):
        sent.batch["big"].add_(added)
        traffic.reset()
        joined = groups("ray", 4).receive_in_pairs(sent)
        assert traffic.reset().stored_objects == stored
        assert torch.equal(joined.batch["big"], sent.batch["big"])


@pytest.mark.nightly
def test_a_dead_owner_is_named(plane_backends, groups):
    host = plane_backends["ray"]
    pool = host.resource_pool([2], use_gpu=False)
    group = host.worker_group(pool, host.class_with_args(Plane))
    others = groups("ray", 4)
    data, survivors = group.call_generate(others, prompts(8)), group.generate(prompts(4))
    for handle in group.workers:
        ray.kill(handle)
    deadline = time.monotonic() + 20  # until the death of the owner is known
    with pytest.raises(LostObjectError, match=r"'big'.*rank 0 in generate.*that called") as caught:
        while time.monotonic() < deadline:
            data[:1].batch["big"]
            time.sleep(0.1)
    assert caught.value.method == "generate" and caught.value.rank == 0
    assert caught.value.field == "big" and caught.value.role
    with pytest.raises(WorkerMethodError, match=r"'big'.*rank [0-3] in generate") as told:
        others.read(data, ["big"])
    assert told.value.method == "read" and isinstance(told.value.cause, LostObjectError)
    assert (told.value.cause.field, told.value.cause.method) == ("big", "generate")
    assert survivors.batch["big"].shape == (4, WIDTH)
    pool.release()


# Objects in rows that only the pickler of Ray can send, and batches pickled outside calls


@pytest.fixture(scope="module")
def plain_group(plane_backends):
    host = plane_backends["ray"]
    pool = host.resource_pool([2], use_gpu=False)
    yield host.worker_group(pool, host.class_with_args(Plane))
    pool.release()


class Holder:
    def __init__(self, data):
        self.data = data


def test_references_in_rows_are_kept(plain_group):
    data = DataProto.from_dict(non_tensors={"o": [{"ref": ray.put(i)} for i in range(4)]})
    assert encode(data.non_tensor_batch["o"], "o")[0].kind == "raw"
    future = plain_group.show.submit(data)
    del data
    gc.collect()
    assert future.get() == [[0, 1], [2, 3]]


def loaded_by_path(tmp_path, name):
    path = tmp_path / "a_file_of_the_user.py"
    path.write_text("class Note:\n    def show(self):\n        return 'shown'\n")
    return import_file(path, "file", name)


@pytest.mark.parametrize(
    "name", ["a_file_of_the_user", "email.a_file_of_the_user", "this"]
)  # no other module has the name; a package has no such module; another file has the name
def test_classes_of_files_loaded_by_path_are_left_to_the_transport(
    tmp_path, plain_group, name, monkeypatch
):
    monkeypatch.setitem(sys.modules, name, None)  # removed after the test
    # One class: pickle itself refuses one that was replaced.
    note = loaded_by_path(tmp_path, name).Note
    rows = object_array([note() for _ in range(4)])
    assert encode(rows, "o")[0].kind == "raw"
    assert plain_group.show(DataProto.from_dict(non_tensors={"o": rows})) == [["shown"] * 2] * 2
    assert encode(object_array([np.float32(1), {"k": {1}}]), "o")[0].kind == "objects"


def nested_batch(rows):
    objects = NonTensorStack(*map(NonTensorData, rows))
    nested = TensorDict({"o": objects, "n": torch.arange(len(rows))}, batch_size=[len(rows)])
    return DataProto.from_dict({"nested": nested})


def test_a_batch_with_such_objects_in_a_nested_tensordict_is_left_to_the_transport():
    message = pack_argument(nested_batch([lambda: 1, lambda: 2]), RayStore())
    assert message.data_bytes() is None
    plain = pack_argument(nested_batch([{"k": 1}, "text"]), RayStore())
    assert plain.data_bytes() is not None


def test_such_objects_in_a_nested_tensordict_arrive_and_come_back(tmp_path, plain_group):
    note = loaded_by_path(tmp_path, "another_file_of_the_user").Note
    rows = [{"ref": ray.put("a")}, {"note": note()}, {"note": note()}, {"ref": ray.put("b")}]
    shown = plain_group.show_nested(nested_batch(rows)).batch["nested"]
    assert [row["shown"] for row in shown.get("o").tolist()] == ["a", "shown", "shown", "b"]
    assert shown["n"].tolist() == [0, 1, 2, 3]


def test_a_pickled_batch_has_its_bytes(plain_group):
    data = plain_group.generate(DataProto.from_dict({"row": torch.arange(4)}))
    assert isinstance(data.batch, RemoteBatch)
    dumped = [pickle.dumps(value) for value in (data, data.batch, data.select(["big"]))]
    del data
    gc.collect()
    time.sleep(0.5)
    for value in map(pickle.loads, dumped):
        batch = value.batch if isinstance(value, DataProto) else value
        assert batch["big"][:, 0].tolist() == [0, 1, 2, 3]


def test_a_batch_inside_an_object_is_sent_as_references(plain_group):
    data = plain_group.generate(DataProto.from_dict({"row": torch.arange(4)}))
    again = ray.get(ray.put({"inside": [data]}))["inside"][0]
    assert isinstance(again.batch, RemoteBatch)
    keys = [[h.key for h in batch.batch.columns["big"].handles] for batch in (data, again)]
    assert keys[0] == keys[1]
    traffic.reset()
    assert plain_group.first_row(Holder(data)) == [0, 0]  # in a call, too
    assert traffic.reset().fetched_bytes == 0


# Futures


def test_futures_of_the_local_backend_are_done():
    group = local_group(Plane)
    future = group.sleep.submit(prompts(4), 0)
    assert future.done() and not future.cancel() and len(future.get(timeout=60)) == 4
    assert len(group.returns_a_future()[0]) == 4


def test_futures_of_the_ray_backend(plain_group):
    group = plain_group
    group.sleep(prompts(4), 0.0)
    slow = group.sleep.submit(prompts(4), 3.0)
    with pytest.raises(CallTimeoutError, match=r"future of \w+\.\w+ has no result in time"):
        slow.get(timeout=0.1)
    assert not slow.done()
    waiting = group.sleep.submit(prompts(4), 0.0)
    assert waiting.cancel()
    assert len(asyncio.run(_await(slow))) == 4 and slow.done()
    with pytest.raises(Exception, match=r"[Cc]ancel"):
        waiting.get(timeout=60)
    fast = group.sleep.submit(prompts(4), 0.0)
    assert [len(future.get()) for future in as_completed([fast], timeout=60)] == [4]


async def _await(future):
    return await future
