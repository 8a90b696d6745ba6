"""The single-process model: a batch as plain columns, and every operation as an index into them.

The model has no splits, handles, messages or processes. It is what a program would compute if all
rows were in one process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from chaos_workers import LIMIT

from quadriga import DataProto

Column = torch.Tensor | list[object]
"""A dense tensor, or a list with one entry per row: tensors of a jagged field, or objects."""


@dataclass
class Rows:
    """The expected content of a batch. Every batch has the columns `id` and `x`."""

    columns: dict[str, Column]

    def __len__(self) -> int:
        return len(self.columns["id"])

    def take(self, index: Sequence[int]) -> Rows:
        """Return the rows of `index`, in that order."""
        return Rows({key: _take(column, index) for key, column in self.columns.items()})

    def select(self, keys: Sequence[str]) -> Rows:
        """Return these columns."""
        return Rows({key: self.columns[key] for key in keys})

    def replaced(self, **columns: Column) -> Rows:
        """Return the rows with some columns replaced or added."""
        return Rows({**self.columns, **columns})


def _take(column: Column, index: Sequence[int]) -> Column:
    if isinstance(column, torch.Tensor):
        return column[torch.tensor(list(index), dtype=torch.long)]
    return [column[i] for i in index]


def random_rows(rng: random.Random, count: int, width: int) -> Rows:
    """Return `count` rows with a random set of optional columns."""
    ids = [rng.randrange(LIMIT) for _ in range(count)]
    x = (torch.tensor(ids)[:, None] * 3 + torch.arange(width)) % LIMIT
    rows = Rows({"id": torch.tensor(ids), "x": x.float()})
    if rng.random() < 0.5:
        rows.columns["h"] = torch.tensor([[i % 7, i % 3] for i in ids], dtype=torch.bfloat16)
    if rng.random() < 0.4:
        rows.columns["rag"] = [torch.full((i % 4,), float(i)) for i in ids]
    if rng.random() < 0.4:
        rows.columns["name"] = [{"id": i, "text": f"row {i}"} for i in ids]
    if rng.random() < 0.3:
        rows.columns["flag"] = torch.tensor([i % 2 == 0 for i in ids])
    return rows


def as_batch(rows: Rows) -> DataProto:
    """Return a local batch with these rows."""
    tensors: dict[str, torch.Tensor] = {}
    arrays: dict[str, object] = {}
    for key, column in rows.columns.items():
        if isinstance(column, torch.Tensor):
            tensors[key] = column.clone()
        elif key == "rag":
            tensors[key] = torch.nested.nested_tensor(list(column), layout=torch.jagged)
        else:
            arrays[key] = list(column)
    return DataProto.from_dict(tensors, arrays)


def affine(rows: Rows, factor: int) -> Rows:
    """Return what `ChaosWorker.affine` computes."""
    x, ids = rows.columns["x"], rows.columns["id"]
    return rows.replaced(x=((x.long() * factor + ids[:, None]) % LIMIT).float())


def fresh(rows: Rows, width: int) -> Rows:
    """Return what `ChaosWorker.fresh` computes."""
    ids = rows.columns["id"].tolist()
    x = torch.from_numpy(np.add.outer(np.array(ids, dtype=np.int64), np.arange(width)) % LIMIT)
    return Rows(
        {
            "id": torch.tensor(ids, dtype=torch.long),
            "x": x.float(),
            "rag": [torch.tensor([float(i + j) for j in range(i % 5)]) for i in ids],
            "name": [{"id": i, "tags": ["a"] * (i % 3)} for i in ids],
        }
    )


METHODS: dict[str, Callable[[Rows, int], Rows]] = {"affine": affine, "fresh": fresh}
"""The model of every method that takes a batch and one number."""


def differences(data: DataProto, rows: Rows) -> list[str]:
    """Return how a batch differs from the expected rows, one line per field."""
    if len(data) != len(rows):
        return [f"{len(data)} rows, expected {len(rows)}"]
    tensors = [] if data.batch is None else list(data.batch.keys())
    keys = {*tensors, *data.non_tensor_batch}
    if keys != set(rows.columns):
        return [f"fields {sorted(keys)}, expected {sorted(rows.columns)}"]
    found = []
    for key, expected in rows.columns.items():
        value = data.batch[key] if key in tensors else data.non_tensor_batch[key]
        different = _difference(value, expected)
        if different:
            found.append(f"field {key!r}: {different}")
    return found


def _difference(value: torch.Tensor | np.ndarray, expected: Column) -> str:
    if isinstance(expected, torch.Tensor):
        try:
            torch.testing.assert_close(value, expected, rtol=0, atol=0)
        except AssertionError as error:
            return str(error)
        return ""
    seen = value.unbind() if isinstance(value, torch.Tensor) else value
    plain = [row.tolist() if isinstance(row, torch.Tensor) else row for row in seen]
    wanted = [row.tolist() if isinstance(row, torch.Tensor) else row for row in expected]
    return "" if plain == wanted else f"{plain}, expected {wanted}"
