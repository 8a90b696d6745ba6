"""Remote fields: fetched when they are read, private to the reader, released after use."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from protocol_cases import Done, shard
from tensordict import TensorDict

from quadriga import protocol
from quadriga.errors import FieldError, LostObjectError
from quadriga.protocol.boundary import pack_argument, pack_result, unpack_argument, unpack_result
from quadriga.protocol.columns import decode
from quadriga.protocol.contents import RemoteBatch
from quadriga.protocol.storage import InProcessStore, fetch_many, traffic


def batch(n: int = 8) -> protocol.DataProto:
    """x [n] int64 (8 bytes a row), wide [n, 4] float32 (16), s object, rag (row i: i floats)."""
    ragged = [torch.full((i,), float(i)) for i in range(n)]
    return protocol.DataProto.from_dict(
        {
            "x": torch.arange(n),
            "wide": torch.arange(4.0 * n).view(n, 4),
            "rag": torch.nested.nested_tensor(ragged, layout=torch.jagged),
        },
        {"s": [f"row {i}" for i in range(n)], "score": np.arange(n) / 2},
    )


def test_operations_on_rows_and_fields_fetch_nothing(store):
    data = shard(batch(), 4)
    traffic.reset()
    other = data.select(["x"], ["s"]).rename("x", "y")
    other.union(data)
    other = protocol.DataProto.concat([part.repeat(2) for part in other.chunk(2)][::-1])
    other.reorder(list(range(len(other)))[::-1])
    other.pop(["wide"], ["score"])
    other.padding(3, "first")
    other = protocol.pad_dataproto_to_divisor(other[1:5], 3)[0].slice(0, 4, 2)
    other.describe(), other.get_data_info(), repr(other), repr(other.batch), len(other)
    other.check_consistency()
    pack_argument(other.split(1))
    data.select().union(data.select(["x"], ["s"]))
    assert traffic.fetched_fields == 0
    assert isinstance(other.batch, RemoteBatch)
    assert other.batch["y"].tolist() == [3, 2]


def test_reading_a_field_fetches_that_field_and_only_its_rows(store, monkeypatch):
    data = shard(batch(), 4)
    traffic.reset()
    assert data.batch["x"].tolist() == list(range(8))
    assert (traffic.fetched_bytes, traffic.fetched_fields) == (64, 1)
    data.batch["x"]
    assert traffic.fetched_fields == 1
    part = data[[6, 1]]
    traffic.reset()
    assert part.batch["wide"].tolist() == [[24, 25, 26, 27], [4, 5, 6, 7]]
    assert traffic.reset().fetched_bytes == 32
    assert part.batch["rag"].unbind()[0].tolist() == [6.0] * 6
    assert traffic.reset().fetched_bytes == 7 * 4 + 3 * 8
    waits: list[int] = []
    monkeypatch.setattr(
        "quadriga.protocol.columns.fetch_many", lambda hs: waits.append(len(hs)) or fetch_many(hs)
    )
    assert data.prefetch(["wide", "s"]) is data
    assert waits == [2 * 4]
    with pytest.raises(FieldError, match="no field 'nope'"):
        data.prefetch(["nope"])
    assert traffic.reset().fetched_fields == 2
    data.non_tensor_batch["s"], data.batch["wide"]
    assert traffic.reset().fetched_fields == 0


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
    assert traffic.fetched_bytes == 8 * 16
    found[0][0] = -1
    assert data[:1].batch["wide"].tolist() == [[-1, -1, -1, -1]]


def test_objects_inside_arrays_and_meta_info_are_private(store, monkeypatch):
    for limit in (-1, 10**6):
        monkeypatch.setattr(protocol.message, "INLINE_BYTES", limit)
        data = protocol.DataProto.from_dict(
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


def test_fields_that_a_worker_does_not_read_are_returned_as_references(store):
    data = shard(batch(), 2)
    traffic.reset()
    argument = unpack_argument(pack_argument(data))
    argument.batch["x"] *= 2
    result = unpack_result(pack_result(argument, protocol.Origin("actor", 0, "double")))
    counts = traffic
    assert counts.stored_objects == 1 and counts.stored_bytes == 64
    assert result.batch["x"].tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    assert result.batch["wide"].tolist() == batch().batch["wide"].tolist()


def test_stored_values_are_released_with_their_last_handle(store):
    data = shard(batch(), 4)
    assert len(store.handles) == 4 * 5
    part = data.chunk(4)[1]
    del data
    assert len(store.handles) == 5
    part.pop(["rag"])
    assert len(store.handles) == 4
    part.batch["wide"]
    assert len(store.handles) == 3
    part.batch["x"] = torch.zeros(2)
    assert len(store.handles) == 2
    del part
    assert len(store.handles) == 0


def replies(data: protocol.DataProto, ranks: int) -> list[Done]:
    return [
        Done(pack_result(part, protocol.Origin("rollout", r, "generate")))
        for r, part in enumerate(data.chunk(ranks))
    ]


def test_a_remote_batch_reads_like_a_tensordict(store):
    data = shard(batch(), 2)
    b, td = data.batch, batch().batch
    assert len(b) == 8 and b.batch_size == td.batch_size == b.shape and b.batch_dims == 1
    assert list(b.keys()) == list(td.keys()) and "x" in b and "nope" not in b
    assert b.get("nope", 3) == 3 and b.get("x").tolist() == td["x"].tolist()
    assert {k: v.shape[0] for k, v in b.items()} == {"x": 8, "wide": 8, "rag": 8}
    assert len(list(b.values())) == 3
    assert b.select("x").to_tensordict()["x"].sum() == 28
    assert list(b.exclude("x", "rag").keys()) == ["wide"]
    assert b[2:4]["x"].tolist() == [2, 3]
    assert b.select("x", "wide").split(3)[2]["x"].tolist() == [6, 7]
    b.rename_key_("x", "y")
    b.update({"z": torch.zeros(8)}).set("w", torch.ones(8))
    assert b.setdefault("w", None).sum() == 8 and list(b.pop("y")) == list(range(8))
    assert b.pop("nope", None) is None
    del b["z"]
    assert list(b.keys()) == ["wide", "rag", "w"]
    assert b.device is None
    assert b.clone()["w"].tolist() == [1.0] * 8
    with pytest.raises(AttributeError, match=r"fetch all tensors with to_tensordict"):
        b.memmap_()
    for call in (lambda: b["nope"], lambda: b.pop("nope"), lambda: b.select("nope")):
        with pytest.raises(FieldError, match="no field 'nope' in batch; it has: wide, rag, w"):
            call()


def test_peek_leaves_the_field_remote(store):
    data = shard(batch(), 2)
    look = data.batch.peek("x")
    look += 1
    assert len(store.handles) == 2 * 5
    assert data.batch["x"].tolist() == list(range(8))
    assert data.batch.peek("x") is not data.batch["x"]


def test_remote_arrays_behave_as_a_dict(store):
    data = shard(batch(4), 2)
    arrays = data.non_tensor_batch
    assert isinstance(arrays, dict) and len(arrays) == 2 and "s" in arrays
    for read in (dict, lambda a: {**a}, lambda a: dict(a.items()), lambda a: a.read_all()):
        found = read(shard(batch(4), 2).non_tensor_batch)
        assert list(found) == ["s", "score"] and found["score"].tolist() == [0, 0.5, 1, 1.5]
    copied = shard(batch(4), 2).non_tensor_batch.copy()
    assert copied.get("s")[0] == "row 0" and copied.get("nope", 1) == 1
    assert copied.pop("s")[3] == "row 3" and copied.pop("s", None) is None
    copied.setdefault("new", np.zeros(4, dtype=object))
    assert set(copied | {"k": np.zeros(4)}) == {"score", "new", "k"}
    with pytest.raises(KeyError):
        copied["nope"]


class DeadHandle:
    """A handle of a value whose owner has died."""

    nbytes, key = 8, "dead"

    def fetch(self):
        return self.fetch_many([self])

    @staticmethod
    def fetch_many(handles):
        raise LostObjectError("gone")


def test_a_lost_object_names_field_rank_and_method(store):
    data = shard(batch(), 4, method="compute_values")
    column = data.batch.columns["wide"]
    column.handles = (*column.handles[:2], DeadHandle(), column.handles[3])
    assert data[0:4].batch["wide"].shape == (4, 4)
    with pytest.raises(LostObjectError, match=r"'wide'.*actor rank 2 in compute_values") as caught:
        data.batch["wide"]
    error = caught.value
    assert (error.field, error.role, error.rank, error.method) == (
        "wide", "actor", 2, "compute_values",
    )  # fmt: skip
    assert data.batch["x"].tolist() == list(range(8))


def test_futures_join(store):
    own = protocol.DataProtoFuture(
        replies(batch(4), 2), collect_fn=lambda outs: protocol.DataProto.concat(outs[::-1])
    )
    assert own.get().batch["x"].tolist() == [2, 3, 0, 1]


def test_futures_of_tensordicts_and_of_other_types(store):
    td = TensorDict({"x": torch.arange(4)}, [4])
    future = protocol.DataProtoFuture(
        [Done(pack_result(td, protocol.Origin("a", 0, "m"))), Done(td)]
    )
    assert isinstance(future.get(), TensorDict)
    assert future.chunk(4)[2].get()["x"].tolist() == [0, 1]
    with pytest.raises(FieldError, match="got int"):
        protocol.DataProtoFuture([Done(3)]).get()


def test_describe(store):
    data = shard(batch(), 4, method="generate")
    data.union(shard(batch().select(["x"], []).rename("x", "v"), 2, method="values"))
    data.batch["mine"] = torch.zeros(8, 2, dtype=torch.bfloat16)
    data.batch["x"]
    lines = {line.split()[0]: line for line in data.describe().splitlines()}
    assert lines["wide"].split("  ")[0] == "wide" and "[8, 4]" in lines["wide"]
    assert "128" in lines["wide"] and "actor[0-3] on 10.0.0.1" in lines["wide"]
    assert lines["wide"].endswith("actor.generate[0-3]")
    assert "actor[0-1] on 10.0.0.1" in lines["v"] and lines["v"].endswith("actor.values[0-1]")
    assert "local" in lines["x"] and lines["x"].endswith("actor.generate[0-3]")
    assert "bfloat16" in lines["mine"] and "local" in lines["mine"]
    assert "[8, *]" in lines["rag"]
    tensors = data.select(non_tensor_batch_keys=[]).describe()
    assert tensors.startswith(
        f"8 rows, 5 fields, {64 + 128 + 208 + 64 + 32} bytes, {128 + 208 + 64} "
    )


def test_stores_are_set_for_a_block_or_for_the_process():
    process, outer, inner = protocol.current_store(), InProcessStore(), InProcessStore()
    with protocol.use_store(outer):
        with protocol.use_store(inner):
            assert protocol.current_store() is inner
        assert protocol.current_store() is outer
    assert protocol.current_store() is process
    protocol.storage.set_process_store(outer)
    assert protocol.current_store() is outer
    protocol.storage.set_process_store(process)


def test_parallel_put_keeps_the_order(store):
    handles = protocol.parallel_put([np.full(3, i) for i in range(20)], max_workers=4)
    assert [h.fetch()[0] for h in handles] == list(range(20))
    assert fetch_many(handles)[7][0] == 7
    assert protocol.parallel_put([]) == []
