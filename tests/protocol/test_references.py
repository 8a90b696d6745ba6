"""Remote fields: fetched when they are read, private to the reader, released after use."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from protocol_cases import shard
from tensordict import TensorDict

from quadriga.errors import FieldError, LostObjectError
from quadriga.protocol import DataProto, Origin, message, pad_dataproto_to_divisor, storage
from quadriga.protocol.boundary import pack_argument, pack_result, unpack_argument, unpack_result
from quadriga.protocol.contents import RemoteBatch
from quadriga.protocol.encoding import decode
from quadriga.protocol.storage import traffic


def batch(n: int = 8) -> DataProto:
    """x [n] int64 (8 bytes a row), wide [n, 4] float32 (16), s object, rag (row i: i floats)."""
    ragged = [torch.full((i,), float(i)) for i in range(n)]
    return DataProto.from_dict(
        {
            "x": torch.arange(n),
            "wide": torch.arange(4.0 * n).view(n, 4),
            "rag": torch.nested.nested_tensor(ragged, layout=torch.jagged),
        },
        {"s": [f"row {i}" for i in range(n)], "score": np.arange(n) / 2},
    )


def as_argument(data: DataProto, ranks: int) -> list[DataProto]:
    """Return what each of `ranks` ranks receives of a split batch."""
    return [unpack_argument(pack_argument(part)) for part in data.chunk(ranks)]


def test_operations_on_rows_and_fields_fetch_nothing(store):
    data = shard(batch(), 4)
    traffic.reset()
    other = data.select(["x"], ["s"]).rename("x", "y")
    other.union(data)
    other = DataProto.concat([part.repeat(2) for part in other.chunk(2)][::-1])
    other.reorder(list(range(len(other)))[::-1])
    other.pop(["wide"], ["score"])
    other.padding(3, "first")
    other = pad_dataproto_to_divisor(other[1:5], 3)[0].slice(0, 4, 2)
    other.describe(), other.get_data_info(), repr(other), repr(other.batch), len(other)
    other.check_consistency()
    pack_argument(other.split(1))
    assert traffic.snapshot().fetched_fields == 0
    assert isinstance(other.batch, RemoteBatch)
    assert other.batch["y"].tolist() == [3, 2]


def test_reading_a_field_fetches_that_field_and_only_its_rows(store):
    data = shard(batch(), 4)
    traffic.reset()
    assert data.batch["x"].tolist() == list(range(8))
    assert (traffic.snapshot().fetched_bytes, traffic.snapshot().fetched_fields) == (64, 1)
    data.batch["x"]
    assert traffic.snapshot().fetched_fields == 1
    part = data[[6, 1]]
    traffic.reset()
    assert part.batch["wide"].tolist() == [[24, 25, 26, 27], [4, 5, 6, 7]]
    assert traffic.reset().fetched_bytes == 32
    assert part.batch["rag"].unbind()[0].tolist() == [6.0] * 6
    assert traffic.reset().fetched_bytes == 7 * 4 + 3 * 8
    assert data.prefetch(["wide", "s"]) is data
    assert traffic.reset().fetched_fields == 2
    data.non_tensor_batch["s"], data.batch["wide"]
    assert traffic.reset().fetched_fields == 0


def test_prefetch_waits_once(store, monkeypatch):
    waits = []
    fetch_many = storage.fetch_many
    monkeypatch.setattr(
        "quadriga.protocol.columns.fetch_many",
        lambda hs: waits.append(len(hs)) or fetch_many(hs),
    )
    data = shard(batch(), 4)
    data.prefetch()
    assert waits == [4 * 5]
    with pytest.raises(FieldError, match="no field 'nope'"):
        data.prefetch(["nope"])


def test_threads_that_read_at_the_same_time_get_one_value(store, monkeypatch):
    """All threads decode the value before the first one keeps it; that one is counted once."""
    threads = 4
    together = threading.Barrier(threads, timeout=20)

    def slow(*args):
        built = decode(*args)
        together.wait()
        return built

    data = shard(batch(), 4)
    traffic.reset()
    monkeypatch.setattr("quadriga.protocol.columns.decode", slow)
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(lambda _: data.batch["wide"], range(threads)))
    monkeypatch.undo()
    assert all(value is found[0] for value in found)
    assert traffic.snapshot().fetched_bytes == 8 * 16
    found[0][0] = -1
    assert data[:1].batch["wide"].tolist() == [[-1, -1, -1, -1]]


@pytest.mark.parametrize("ranks", [3, 4, 5])
def test_fan_out_copies_exactly_the_rows_of_each_rank(store, ranks):
    """4 ranks produced 15 rows each; `ranks` ranks read one field of their parts."""
    n = 60
    data = shard(batch(n), 4)
    for r, part in enumerate(as_argument(data, ranks)):
        traffic.reset()
        lo = r * (n // ranks)
        assert part.batch["wide"][0, 0].item() == 4 * lo
        assert traffic.reset().fetched_bytes == (n // ranks) * 16
        assert part.batch["x"].tolist() == list(range(lo, lo + n // ranks))


def test_ranks_that_share_a_part_share_one_stored_object(store):
    data = batch(8)
    traffic.reset()
    packed = [pack_argument(part) for part in data.chunk(2)]
    assert traffic.snapshot().stored_objects == 2 * 5
    ranks = [unpack_argument(packed[r // 2]) for r in range(4)]
    for part in ranks:
        part.prefetch()
    assert traffic.snapshot().stored_objects == 2 * 5
    assert ranks[0].batch["x"].tolist() == ranks[1].batch["x"].tolist() == [0, 1, 2, 3]


def test_writing_into_a_received_batch_changes_no_other_copy(store):
    local = batch()
    for data in (local, shard(batch(), 2)):
        packed = pack_argument(data)
        mine, sibling = unpack_argument(packed), unpack_argument(packed)
        mine.batch["x"] += 100
        mine.batch["wide"].zero_()
        mine.batch["rag"].values().fill_(-1)
        mine.non_tensor_batch["s"][0] = "changed"
        mine.non_tensor_batch["score"] *= 0
        mine.batch["new"] = torch.ones(8)
        mine.pop(["wide"])
        for other in (sibling, data, unpack_argument(packed)):
            assert other.union(batch()).batch["x"].tolist() == list(range(8))
            assert "new" not in set(other.batch.keys())


def test_objects_inside_arrays_and_meta_info_are_private(store, monkeypatch):
    for limit in (-1, 10**6):
        monkeypatch.setattr(message, "INLINE_BYTES", limit)
        data = DataProto.from_dict(
            {"x": torch.zeros(2)}, {"o": [{"n": [1]}, {"n": [2]}]}, {"m": {"list": [1]}}
        )
        data.meta_info["array"], data.meta_info["t"] = np.zeros(2), torch.zeros(2)
        packed = pack_argument(data)
        mine, sibling = unpack_argument(packed), unpack_argument(packed)
        mine.non_tensor_batch["o"][0]["n"].append(9)
        mine.meta_info["m"]["list"].append(9)
        mine.meta_info["array"] += 1
        mine.meta_info["t"] += 1
        for other in (sibling, data):
            assert other.non_tensor_batch["o"][0] == {"n": [1]}
            assert other.meta_info["m"] == {"list": [1]}
            assert other.meta_info["array"].tolist() == other.meta_info["t"].tolist() == [0, 0]


def test_a_result_is_a_snapshot(store):
    """A worker may write into a tensor after it has returned it."""
    for limit in (-1, 10**6):
        message.INLINE_BYTES, before = limit, message.INLINE_BYTES
        kept = torch.zeros(4)
        reply = pack_result(DataProto.from_dict({"x": kept}), Origin("actor", 0, "m"))
        kept += 1
        message.INLINE_BYTES = before
        assert unpack_result(reply).batch["x"].tolist() == [0, 0, 0, 0]


def test_tensors_and_arrays_outside_batches_are_private(store):
    sent = {"t": torch.zeros(2), "a": [np.zeros(2)], "n": (1, "x")}
    got = unpack_argument(pack_argument(sent))
    got["t"] += 1
    got["a"][0] += 1
    assert sent["t"].tolist() == [0, 0] and sent["a"][0].tolist() == [0, 0]
    assert got["n"] == (1, "x")


def test_fields_that_a_worker_does_not_read_are_returned_as_references(store):
    data = shard(batch(), 2)
    traffic.reset()
    argument = unpack_argument(pack_argument(data))
    argument.batch["x"] *= 2
    result = unpack_result(pack_result(argument, Origin("actor", 0, "double")))
    counts = traffic.snapshot()
    assert counts.stored_objects == 1 and counts.stored_bytes == 64
    assert result.batch["x"].tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert result.batch["wide"].tolist() == batch().batch["wide"].tolist()


def test_stored_values_are_released_with_their_last_handle(store):
    data = shard(batch(), 4)
    assert store.objects_held == 4 * 5
    part = data.chunk(4)[1]
    del data
    assert store.objects_held == 5
    part.pop(["rag"])
    assert store.objects_held == 4
    part.batch["wide"]
    assert store.objects_held == 3
    part.batch["x"] = torch.zeros(2)
    assert store.objects_held == 2
    del part
    assert store.objects_held == 0


def test_500_steps_leave_no_bytes_in_the_store(store):
    for _ in range(500):
        data = shard(batch(4), 2)
        data.union(shard(batch(4).select(["x"], []).rename("x", "y"), 2))
        for part in as_argument(data, 2):
            part.batch["x"] += 1
            shard(part, 1).batch["x"]
    del data, part
    assert store.objects_held == 0 and store.bytes_held == 0


def test_small_fields_are_sent_in_the_message_and_are_local(store, monkeypatch):
    monkeypatch.setattr(message, "INLINE_BYTES", 64)
    data = shard(batch(16), 2)
    assert isinstance(data.batch, RemoteBatch) and store.objects_held == 2 * 3  # wide, rag, s
    small = data.select(["x"], ["score"])
    assert isinstance(small.batch, TensorDict) and type(small.non_tensor_batch) is dict
    assert isinstance(shard(batch(2), 2).batch, TensorDict)


class DeadHandle:
    """A handle of a value whose owner has died."""

    nbytes, key = 8, "dead"

    def fetch(self):
        return self.fetch_many([self])

    @staticmethod
    def fetch_many(handles):
        raise LostObjectError("gone")


class Reply:
    """A pending result that counts how often it is waited for."""

    def __init__(self, value):
        self.value, self.waits = value, 0

    def result(self):
        self.waits += 1
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def replies(data: DataProto, ranks: int) -> list[Reply]:
    return [
        Reply(pack_result(part, Origin("rollout", r, "generate")))
        for r, part in enumerate(data.chunk(ranks))
    ]
