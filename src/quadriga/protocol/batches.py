"""Operations on the two halves of a batch, whatever they are made of."""

from __future__ import annotations

import copy as _copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensordict import TensorDict

from quadriga.errors import FieldError, LengthError
from quadriga.protocol import values
from quadriga.protocol.rowops import RowOp

Batch = Any  # TensorDict | RefBatch | None
Arrays = dict[str, np.ndarray[Any, Any]]


def arrays_len(arrays: Arrays) -> int:
    """Rows of a batch that has no tensors."""
    for value in arrays.values():
        return values.row_count(value)
    return 0


def rebuild(batch: TensorDict, fields: Mapping[str, Any], length: int) -> TensorDict:
    """A `TensorDict` like `batch` with other fields and another length."""
    return values.as_tensordict(fields, (length, *batch.batch_size[1:]), batch.device)


def take(batch: Batch, arrays: Arrays, op: RowOp) -> tuple[Batch, Arrays]:
    """The chosen rows of both halves."""
    if batch is not None:
        fields = {key: values.take(value, op) for key, value in batch.items()}
        batch = rebuild(batch, fields, len(op))
    return batch, {key: values.take(value, op) for key, value in arrays.items()}


def row_of_batch(batch: Batch, row: int) -> TensorDict:
    """One row, as a `TensorDict` without that dimension."""
    fields = {key: values.row(value, row) for key, value in batch.items()}
    return TensorDict(fields, batch_size=batch.batch_size[1:], device=batch.device)


def select(batch: Batch, keys: Sequence[str] | None) -> Batch:
    """A new container with these keys; values are shared."""
    if batch is None:
        if keys:
            raise missing(keys[0], (), "batch")
        return None
    if isinstance(keys, str):
        keys = [keys]
    chosen = list(batch.keys()) if keys is None else list(keys)
    for key in chosen:
        if key not in batch.keys():  # noqa: SIM118
            raise missing(key, batch.keys(), "batch")
    return batch.select(*chosen)


def pick(fields: Mapping[str, Any], keys: Sequence[str] | None, kind: str) -> dict[str, Any]:
    """A new dict with these keys; values are shared."""
    if isinstance(keys, str):
        keys = [keys]
    for key in keys or ():
        if key not in fields:
            raise missing(key, fields, kind)
    chosen = fields if keys is None else keys
    return {key: fields[key] for key in chosen}


def missing(key: str, known: Any, kind: str) -> FieldError:
    """The error for a key that is not there; names those that are."""
    there = ", ".join(map(str, known)) or "nothing"
    return FieldError(f"no field '{key}' in {kind}; it holds: {there}", field=key)


def rename(batch: Batch, old: str | Sequence[str], new: str | Sequence[str]) -> Batch:
    """The batch with keys renamed, order kept."""
    old = [old] if isinstance(old, str) else list(old)
    new = [new] if isinstance(new, str) else list(new)
    if len(old) != len(new):
        raise LengthError(f"rename needs as many new keys as old ones; got {old} and {new}")
    names = dict(zip(old, new, strict=True))
    present = [] if batch is None else list(batch.keys())
    for key in old:
        if key not in present:
            raise missing(key, present, "batch")
    renamed = [names.get(key, key) for key in present]
    if len(set(renamed)) != len(renamed):
        twice = next(key for key in renamed if renamed.count(key) > 1)
        raise FieldError(f"rename would give two fields the name '{twice}'", field=twice)
    if batch is None:
        return None
    return rebuild(batch, {names.get(k, k): v for k, v in batch.items()}, int(batch.batch_size[0]))


def prefetch(batch: Batch, arrays: Arrays, keys: Sequence[str] | None) -> None:
    """Fetches fields that lie elsewhere."""


def deepcopy(batch: Batch, arrays: Arrays) -> tuple[Batch, Arrays]:
    """Private copies of everything that is local."""
    if batch is not None:
        fields = {key: values.clone(value) for key, value in batch.items()}
        batch = rebuild(batch, fields, int(batch.batch_size[0]))
    return batch, _copy.deepcopy(arrays)
