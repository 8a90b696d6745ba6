"""Every operation on batches with jagged tensors only, without tensors, rows or fields.

The expected rows come from plain lists of dicts.
"""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from protocol_cases import rows_of

from quadriga.errors import FieldError, LengthError
from quadriga.protocol import (
    DataProto,
    DataProtoFuture,
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)
from quadriga.protocol.boundary import pack_argument, unpack_argument

ROWS = [{"x": i, "rag": [float(i)] * (2 * i), "s": "abcd"[i]} for i in range(4)]
KINDS = {
    "everything": (("x", "rag", "s"), 4),
    "jagged": (("rag",), 4),
    "no tensors": (("s",), 4),
    "no rows": (("x", "rag", "s"), 0),
    "no rows, no tensors": (("s",), 0),
    "nothing": ((), 0),
}


def rows_for(kind: str) -> list[dict]:
    keys, count = KINDS[kind]
    return [{k: r[k] for k in keys} for r in ROWS[:count]]


def batch_for(kind: str) -> DataProto:
    keys, count = KINDS[kind]
    offsets = torch.tensor([0, 0, 2, 6, 12][: count + 1])
    ragged = torch.cat([torch.tensor(r["rag"]) for r in ROWS[:count]] or [torch.zeros(0)])
    tensors = {
        "x": torch.arange(count),
        "rag": torch.nested.nested_tensor_from_jagged(ragged, offsets),
    }
    arrays = {"s": [r["s"] for r in ROWS[:count]]}
    return DataProto.from_dict(
        {k: v for k, v in tensors.items() if k in keys},
        {k: v for k, v in arrays.items() if k in keys},
    )


def tensor_keys(data: DataProto) -> list[str]:
    return [] if data.batch is None else list(data.batch.keys())


def reordered(data: DataProto) -> DataProto:
    data.reorder(torch.arange(len(data) - 1, -1, -1))
    return data


def padded(data: DataProto) -> DataProto:
    data.padding(2, "last")
    return data


def united(data: DataProto) -> DataProto:
    return data.union(copy.deepcopy(data)).union(DataProto())


def helpers_united(data: DataProto) -> DataProto:
    other = copy.deepcopy(data)
    batch = None if data.batch is None else union_tensor_dict(data.batch, other.batch)
    return DataProto(batch, union_numpy_dict(data.non_tensor_batch, other.non_tensor_batch))


def described(data: DataProto) -> DataProto:
    assert f"{len(data)} rows" in data.describe()
    for key in [*tensor_keys(data), *data.non_tensor_batch]:
        assert f" {key}:" in data.get_data_info() and f"\n{key} " in data.describe()
    data.print_size()
    data.check_consistency()
    assert repr(data)
    return data


def folded(data: DataProto) -> DataProto:
    dense = data.select([k for k in tensor_keys(data) if k != "rag"])
    return unfold_batch_dim(fold_batch_dim(dense, 2))


def renamed(data: DataProto) -> DataProto:
    keys = tensor_keys(data)
    return data.rename(keys, [f"{k}2" for k in keys])


class Done:
    def __init__(self, value):
        self.value = value

    def result(self):
        return self.value


def without(rows: list[dict], *keys: str) -> list[dict]:
    return [r for r in [{k: v for k, v in r.items() if k not in keys} for r in rows] if r]


def twice(rows: list[dict]) -> list[dict]:
    return [r for r in rows for _ in range(2)]


OPERATIONS = {
    "slice": (lambda d: d.slice(1, 3), lambda r: r[1:3]),
    "backwards": (lambda d: d[::-1], lambda r: r[::-1]),
    "list": (lambda d: d[[*range(len(d))][::-1]], lambda r: r[::-1]),
    "mask": (lambda d: d[torch.arange(len(d)) % 2 == 0], lambda r: r[::2]),
    "no row": (lambda d: d[[]], lambda r: []),
    "select_idxs": (lambda d: d.select_idxs(np.arange(len(d))[1:]), lambda r: r[1:]),
    "select": (lambda d: d.select(deepcopy=True), lambda r: r),
    "pop tensors": (lambda d: d.pop(batch_keys=tensor_keys(d)), lambda r: without(r, "s")),
    "pop arrays": (
        lambda d: d.pop(non_tensor_batch_keys=list(d.non_tensor_batch)),
        lambda r: without(r, "x", "rag"),
    ),
    "rename": (
        renamed,
        lambda r: [{k if k == "s" else f"{k}2": v for k, v in q.items()} for q in r],
    ),
    "union": (united, lambda r: r),
    "union helpers": (helpers_united, lambda r: r),
    "reorder": (reordered, lambda r: r[::-1]),
    "repeat": (lambda d: d.repeat(2), twice),
    "repeat without interleaving": (lambda d: d.repeat(2, interleave=False), lambda r: r + r),
    "sample_level_repeat": (lambda d: d.sample_level_repeat([2] * len(d)), twice),
    "unfold_column_chunks": (lambda d: d.unfold_column_chunks(2), twice),
    "make_iterator": (
        lambda d: [*d.make_iterator(2, 2, dataloader_kwargs={"shuffle": False})],
        lambda r: r + r,
    ),
    "chunk": (lambda d: d.chunk(2)[::-1], lambda r: r[2:] + r[:2]),
    "split": (lambda d: d.split(3), lambda r: r),
    "concat": (lambda d: DataProto.concat([d[2:], d, d[:0]]), lambda r: r[2:] + r),
    "padding": (padded, lambda r: r + r[-1:] * 2),
    "pad": (lambda d: pad_dataproto_to_divisor(d, 3)[0], lambda r: r + r[:2]),
    "unpad": (lambda d: unpad_dataproto(d, len(d) // 2), lambda r: r[:2]),
    "to": (lambda d: d.to("cpu"), lambda r: r),
    "prefetch": (lambda d: d.prefetch(), lambda r: r),
    "tensordict": (lambda d: DataProto.from_tensordict(d.to_tensordict()), lambda r: r),
    "pickle": (lambda d: pickle.loads(pickle.dumps(d)), lambda r: r),
    "deepcopy": (copy.deepcopy, lambda r: r),
    "rows and back": (lambda d: collate_fn(list(d)), lambda r: r),
    "single rows": (lambda d: DataProto.concat([d[i : i + 1] for i in range(len(d))]), lambda r: r),
    "describe": (described, lambda r: r),
    "fold": (folded, lambda r: without(r, "rag")),
    "pack and unpack": (lambda d: unpack_argument(pack_argument(d)), lambda r: r),
    "future": (lambda d: [p.get() for p in DataProtoFuture([Done(d)]).chunk(2)], lambda r: r),
}
NEEDS_ROWS = {"padding", "rows and back", "single rows"}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_operation(form, kind, operation):
    act, expected = OPERATIONS[operation]
    data, rows = form(batch_for(kind)), rows_for(kind)
    if operation in NEEDS_ROWS and not rows:
        with pytest.raises(LengthError):
            act(data)
        return
    found = act(data)
    parts = found if isinstance(found, list) else [found]
    assert [row for part in parts for row in rows_of(part)] == expected(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_files_and_fields(form, kind, tmp_path):
    """A saved batch is loaded equal, and batches without rows keep their fields."""
    data = form(batch_for(kind))
    data.save_to_disk(tmp_path / "batch")
    for back in (DataProto.load_from_disk(tmp_path / "batch"), form(batch_for(kind))[:]):
        assert rows_of(back) == rows_for(kind)
        assert {*tensor_keys(back), *back.non_tensor_batch} == set(KINDS[kind][0])
        assert "rag" not in KINDS[kind][0] or back.batch["rag"].is_nested


def test_jagged_columns_are_split_row_by_row(form):
    """Rows of 0, 2, 4 and 6 numbers are split in two."""
    cut = form(batch_for("everything")).unfold_column_chunks(2, ["rag"])
    expected = [[], [], [1.0], [1.0], [2.0] * 2, [2.0] * 2, [3.0] * 3, [3.0] * 3]
    assert [row["rag"] for row in rows_of(cut)] == expected
    assert [row["x"] for row in rows_of(cut)] == [0, 0, 1, 1, 2, 2, 3, 3]
    with pytest.raises(LengthError, match=r"row 1 of jagged field 'rag' has 2 .*divide into 3"):
        form(batch_for("jagged")).unfold_column_chunks(3, ["rag"])
    with pytest.raises(FieldError, match="'rag' is jagged"):
        fold_batch_dim(form(batch_for("jagged")), 2)
    with pytest.raises(LengthError, match="at least 1 part to split columns into, got 0"):
        form(batch_for("jagged")).unfold_column_chunks(0)
