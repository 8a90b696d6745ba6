"""Random programs of 1 to 12 operations on a remote batch, a local batch and a list of rows.

The list of rows is the independent reference: it uses no tensors, row maps or fields.
"""

import copy
import pickle
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from protocol_cases import CountedStore, Done, rows_of, shard

from quadriga.protocol import (
    DataProto,
    DataProtoFuture,
    message,
    pad_dataproto_to_divisor,
    unpad_dataproto,
    use_store,
)

Row = dict[str, Any]
DTYPES = {
    "i": torch.int64, "j": torch.int64, "f": torch.float32, "b": torch.bfloat16, "t": torch.bool,
}  # fmt: skip


def make(n: int) -> list[Row]:
    """`n` different rows: i, j int, f [2] float, b bfloat16, t bool, rag list, s object, a float"""
    return [
        {
            "i": k, "j": 100 - k, "f": [k + 0.5, -k], "b": float(k % 7), "t": k % 3 == 0,
            "rag": [float(k)] * (k % 4), "s": {"name": f"row {k}"}, "a": k / 4,
        }
        for k in range(n)
    ]  # fmt: skip


def batch_of(rows: list[Row]) -> DataProto:
    tensors: dict[str, Any] = {
        k: torch.tensor([r[k] for r in rows], dtype=d).reshape(
            len(rows), *([2] if k == "f" else [])
        )
        for k, d in DTYPES.items()
    }
    values = torch.tensor([v for r in rows for v in r["rag"]])
    offsets = torch.tensor([0, *np.cumsum([len(r["rag"]) for r in rows])])
    tensors["rag"] = torch.nested.nested_tensor_from_jagged(values, offsets.long())
    arrays = {"s": [r["s"] for r in rows], "a": np.array([r["a"] for r in rows], dtype=np.float64)}
    return DataProto.from_dict(tensors, arrays)


def op_slice(draw, rows, *batches):
    a, b = draw(st.integers(-12, 12)), draw(st.integers(-12, 12))
    step = draw(st.sampled_from([None, 1, 2, -1]))
    return rows[a:b:step], *(d.slice(a, b, step) for d in batches)


def op_index(draw, rows, *batches):
    n = len(rows)
    index = draw(st.lists(st.integers(-n, n - 1), max_size=12)) if n else []
    form = draw(st.sampled_from([list, np.array, torch.tensor]))
    given_index = form(index) if index else []
    return [rows[i] for i in index], *(d.select_idxs(given_index) for d in batches)


def op_reorder(draw, rows, *batches):
    order = draw(st.permutations(range(len(rows))))
    for data in batches:
        data.reorder(torch.tensor(order, dtype=torch.long))
    return [rows[i] for i in order], *batches


def op_repeat(draw, rows, *batches):
    times, interleave = draw(st.integers(0, 3)), draw(st.booleans())
    if len(rows) * times > 60:
        times = 1
    expected = [r for r in rows for _ in range(times)] if interleave else rows * times
    return expected, *(d.repeat(times, interleave) for d in batches)


def op_sample_repeat(draw, rows, *batches):
    times = draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    expected = [r for r, t in zip(rows, times, strict=True) for _ in range(t)]
    return expected, *(d.sample_level_repeat(times) for d in batches)


def op_chunk_concat(draw, rows, *batches):
    parts = draw(st.integers(1, 5))
    batches = tuple(pad_dataproto_to_divisor(d, parts)[0] for d in batches)
    rows = [rows[i % len(rows)] for i in range(-(-len(rows) // parts) * parts)] if rows else []
    order = draw(st.permutations(range(parts)))
    size = len(rows) // parts
    expected = [r for p in order for r in rows[p * size : (p + 1) * size]]
    return expected, *(DataProto.concat([d.chunk(parts)[p] for p in order]) for d in batches)


def op_pad_unpad(draw, rows, *batches):
    if not rows:
        return rows, *batches
    size, where = draw(st.integers(0, 4)), draw(st.sampled_from(["first", "last"]))
    off = draw(st.integers(0, size))
    for data in batches:
        data.padding(size, where)
    expected = rows + [rows[0 if where == "first" else -1]] * size
    expected = expected[: len(expected) - off]
    return expected, *(unpad_dataproto(d, off) for d in batches)


def op_pop_union(draw, rows, *batches):
    keys = [k for k in ("i", "f", "rag") if draw(st.booleans())]
    arrays = [k for k in ("s", "a") if draw(st.booleans())]
    present = set(rows[0]) if rows else set()
    keys, arrays = ([k for k in ks if k in present] for ks in (keys, arrays))
    result = []
    for data in batches:
        result.append(data.pop(keys, arrays).union(data))
    return rows, *result


def op_select(draw, rows, *batches):
    if not rows:
        return rows, *batches
    present = list(rows[0])
    keep = draw(st.sets(st.sampled_from(present), min_size=1))
    tensors = [k for k in present if k in keep and k not in ("s", "a")]
    arrays = [k for k in present if k in keep and k in ("s", "a")]
    expected = [{k: v for k, v in r.items() if k in keep} for r in rows]
    return expected, *(d.select(tensors, arrays) for d in batches)


def op_concat_with_renamed(draw, rows, *batches):
    """Two fields of one shard are concatenated under one key."""
    if not rows or not {"i", "j"} <= set(rows[0]) or len(rows) > 20:
        return rows, *batches
    swapped = [{**r, "i": r["j"], "j": r["i"]} for r in rows]
    result = []
    for data in batches:
        other = data.select().rename(["i", "j"], ["j", "i"])
        result.append(DataProto.concat([data, other]))
    return rows + swapped, *result


def op_read(draw, rows, *batches):
    """Reading a field makes it local and changes nothing else."""
    if rows:
        keys = draw(st.sets(st.sampled_from(list(rows[0]))))
        for data in batches:
            data.prefetch(list(keys))
    return rows, *batches


def op_pickle(draw, rows, *batches):
    return rows, *(pickle.loads(pickle.dumps(d)) for d in batches)


def op_deepcopy(draw, rows, *batches):
    """Writing into a copy does not change the original."""
    for data in batches:
        copied = copy.deepcopy(data)
        if rows and "i" in rows[0]:
            copied.batch["i"] += 1
        del copied
    return rows, *(copy.deepcopy(d) for d in batches)


def op_future(draw, rows, *batches):
    """The parts of a future are read in any order and joined."""
    parts = draw(st.sampled_from([n for n in (1, 2, 3) if len(rows) % n == 0]))
    order = draw(st.permutations(range(parts)))
    size = len(rows) // parts
    result = []
    for data in batches:
        pieces = DataProtoFuture([Done(data)]).chunk(parts)
        result.append(DataProtoFuture.concat([pieces[p] for p in order]).get())
    return [r for p in order for r in rows[p * size : (p + 1) * size]], *result


def op_write(draw, rows, *batches):
    if not rows or "f" not in rows[0]:
        return rows, *batches
    for data in batches:
        data.batch["f"] = data.batch["f"] * 2
    return [{**r, "f": [v * 2 for v in r["f"]]} for r in rows], *batches


def op_send(draw, rows, *batches):
    """The batch is returned by the ranks of a group."""
    local, *others = batches
    return rows, local, *(shard(d, draw(st.integers(1, 3))) for d in others)


OPS = [value for name, value in sorted(globals().items()) if name.startswith("op_")]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_programs_agree(data):
    before, message.INLINE_BYTES = message.INLINE_BYTES, data.draw(st.sampled_from([-1, 40, 65536]))
    store = CountedStore()
    try:
        with use_store(store):
            rows = make(data.draw(st.integers(0, 9)))
            start = batch_of(rows)
            batches = (copy.deepcopy(start), shard(start, data.draw(st.integers(1, 4))))
            del start
            program = data.draw(st.lists(st.sampled_from(OPS), min_size=1, max_size=12))
            for op in program:
                rows, *batches = op(data.draw, rows, *batches)
                assert [len(d) for d in batches] == [len(rows)] * 2
            for batch in batches:
                found = rows_of(batch)
                assert len(found) == len(rows)
                for row, expected in zip(found, rows, strict=True):
                    assert row == expected, [op.__name__ for op in program]
            local, remote = batches
            for key in [] if local.batch is None else local.batch.keys():
                assert local.batch[key].dtype == remote.batch[key].dtype
                assert local.batch[key].shape[2:] == remote.batch[key].shape[2:]
            del local, remote, batch, batches, found
            assert not store.handles
    finally:
        message.INLINE_BYTES = before
