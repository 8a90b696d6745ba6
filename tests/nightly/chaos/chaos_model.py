"""The single-process model: a batch as plain columns, and every operation as an index into them.

The model has no splits, handles, messages or processes. It is what a program would compute if all
rows were in one process.
"""

import random
from collections.abc import Callable, Sequence

import torch
from chaos_workers import LIMIT

from quadriga import DataProto

Column = torch.Tensor | list[object]
"""A dense tensor, or a list with one entry per row: tensors of a jagged field, or objects."""
Rows = dict[str, Column]
"""The expected content of a batch. Every batch has the columns `id` and `x`."""


def take(rows: Rows, index: Sequence[int]) -> Rows:
    """Return the rows of `index`, in that order."""
    return {
        key: column[list(index)] if isinstance(column, torch.Tensor) else [column[i] for i in index]
        for key, column in rows.items()
    }


def random_rows(rng: random.Random, count: int, width: int) -> Rows:
    """Return `count` rows with a random set of optional columns."""
    ids = [rng.randrange(LIMIT) for _ in range(count)]
    x = (torch.tensor(ids)[:, None] * 3 + torch.arange(width)) % LIMIT
    rows: Rows = {"id": torch.tensor(ids), "x": x.float()}
    if rng.random() < 0.5:
        rows["h"] = torch.tensor([[i % 7, i % 3] for i in ids], dtype=torch.bfloat16)
    if rng.random() < 0.4:
        rows["rag"] = [torch.full((i % 4,), float(i)) for i in ids]
    if rng.random() < 0.4:
        rows["name"] = [{"id": i, "text": f"row {i}"} for i in ids]
    if rng.random() < 0.3:
        rows["flag"] = torch.tensor([i % 2 == 0 for i in ids])
    return rows


def as_batch(rows: Rows) -> DataProto:
    """Return a local batch with these rows."""
    tensors = {key: c.clone() for key, c in rows.items() if isinstance(c, torch.Tensor)}
    if "rag" in rows:
        tensors["rag"] = torch.nested.nested_tensor(list(rows["rag"]), layout=torch.jagged)
    return DataProto.from_dict(tensors, {"name": list(rows["name"])} if "name" in rows else None)


def affine(rows: Rows, factor: int) -> Rows:
    """Return what `ChaosWorker.affine` computes."""
    return rows | {"x": ((rows["x"].long() * factor + rows["id"][:, None]) % LIMIT).float()}


def fresh(rows: Rows, width: int) -> Rows:
    """Return what `ChaosWorker.fresh` computes."""
    ids = rows["id"].tolist()
    return {
        "id": torch.tensor(ids),
        "x": torch.tensor([[(i + j) % LIMIT for j in range(width)] for i in ids]).float(),
        "rag": [torch.tensor([float(i + j) for j in range(i % 5)]) for i in ids],
        "name": [{"id": i, "tags": ["a"] * (i % 3)} for i in ids],
    }


METHODS: dict[str, Callable[[Rows, int], Rows]] = {"affine": affine, "fresh": fresh}
"""The model of every method that takes a batch and one number."""


def differences(data: DataProto, rows: Rows) -> list[str]:
    """Return how a batch differs from the expected rows, one line per field."""
    if len(data) != len(rows["id"]):
        return [f"{len(data)} rows, expected {len(rows['id'])}"]
    found = {**data.batch, **data.non_tensor_batch}
    if found.keys() != rows.keys():
        return [f"fields {sorted(found)}, expected {sorted(rows)}"]
    different = ((key, _difference(found[key], column)) for key, column in rows.items())
    return [f"field {key!r}: {text}" for key, text in different if text]


def _difference(value: object, expected: Column) -> str:
    if not isinstance(expected, torch.Tensor):
        plain, wanted = _plain(value), _plain(expected)
        return "" if plain == wanted else f"{plain}, expected {wanted}"
    try:
        torch.testing.assert_close(value, expected, rtol=0, atol=0)
    except AssertionError as error:
        return str(error)
    return ""


def _plain(column: object) -> list[object]:
    rows = column.unbind() if isinstance(column, torch.Tensor) else column
    return [row.tolist() if isinstance(row, torch.Tensor) else row for row in rows]
