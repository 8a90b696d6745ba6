"""The data plane through worker groups on both backends, and through processes of Ray."""

from __future__ import annotations

import copy
import time

import pytest
import ray
import torch
from plane_workers import WIDTH, Plane
from protocol_cases import ARRAYS, TENSORS, same_value

from quadriga.errors import LostObjectError, WorkerMethodError
from quadriga.protocol import DataProto, message
from quadriga.protocol.contents import RemoteBatch
from quadriga.protocol.storage import traffic

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
    with pytest.raises(LostObjectError, match=r"'big'.*rank 0 in generate") as caught:
        read_until_lost(data)
    assert caught.value.method == "generate" and caught.value.rank == 0
    assert caught.value.field == "big" and caught.value.role
    with pytest.raises(WorkerMethodError, match=r"'big'.*rank [0-3] in generate") as told:
        others.read(data, ["big"])
    assert told.value.method == "read" and isinstance(told.value.cause, LostObjectError)
    assert (told.value.cause.field, told.value.cause.method) == ("big", "generate")
    assert survivors.batch["big"].shape == (4, WIDTH)
    pool.release()


def read_until_lost(data: DataProto) -> None:
    """Read until the death of the owner is known, for at most 20 s."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        data[:1].batch["big"]
        time.sleep(0.1)
