"""Operations on the two halves of a batch, whatever they are made of.

The tensor half is a `TensorDict`, a `RemoteBatch` or None; the array half a dict or a `RemoteArrays`.
Each operation looks at the plain columns and builds the simplest container that holds the result:
a real `TensorDict` and a plain dict unless some field lies elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from tensordict import TensorDict

from quadriga.errors import FieldError, LengthError
from quadriga.protocol.columns import column as columns
from quadriga.protocol.columns.remote_arrays import RemoteArrays
from quadriga.protocol.columns.remote_batch import RemoteBatch
from quadriga.protocol.values import operations as values
from quadriga.protocol.values.row_selection import RowOp, Span

Batch = Any  # TensorDict | RemoteBatch | None
Arrays = dict[str, np.ndarray[Any, Any]]


class Contents(NamedTuple):
    """What a batch holds: its tensor half, its array half and its settings."""

    batch: Batch
    arrays: Arrays
    meta: dict[str, Any]

    @property
    def rows(self) -> int:
        """Length of dimension 0; 0 when there is no field at all."""
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        for _, length in lengths_of_arrays(self.arrays):
            return length
        return 0


def tensor_columns(batch: Batch) -> dict[str, Any]:
    """Key to tensor or `RemoteColumn`; fetches nothing."""
    if batch is None:
        return {}
    return batch.columns if isinstance(batch, RemoteBatch) else dict(batch.items())


def array_columns(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Key to array or `RemoteColumn`; fetches nothing."""
    return arrays.columns if isinstance(arrays, RemoteArrays) else dict(arrays)


def make_batch(like: Batch, fields: Mapping[str, Any], length: int) -> Batch:
    """The tensor half for these columns, of `length` rows, else as `like`."""
    return batch_of(fields, (length, *like.batch_size[1:]), like.device)


def batch_of(fields: Mapping[str, Any], size: Sequence[int], device: Any) -> Batch:
    """The tensor half for these columns: a `TensorDict` when all of them are here."""
    if _any_remote(fields):
        return RemoteBatch(fields, tuple(size), device)
    local = {key: columns.local(column) for key, column in fields.items()}
    return values.as_tensordict(local, size, device)


def make_arrays(fields: Mapping[str, Any]) -> Arrays:
    """The array half for these columns."""
    if _any_remote(fields):
        return RemoteArrays(fields)
    return {key: columns.local(column) for key, column in fields.items()}


def _any_remote(fields: Mapping[str, Any]) -> bool:
    return any(columns.is_remote(column) for column in fields.values())


def lengths_of_arrays(arrays: Arrays) -> list[tuple[str, int]]:
    """Rows of each array; -1 for one without dimensions. Raises `FieldError` for other types."""
    lengths = []
    for key, value in array_columns(arrays).items():
        if isinstance(value, columns.RemoteColumn) and columns.is_remote(value):
            lengths.append((key, len(value.rows)))
        elif isinstance(columns.local(value), np.ndarray):
            lengths.append((key, values.row_count(columns.local(value))))
        else:
            raise FieldError(
                f"field '{key}' of non_tensor_batch is a {type(value).__name__}; expected a numpy "
                "array (np.array(list, dtype=object), or pass the list through from_dict)",
                field=key,
            )
    return lengths


def take(batch: Batch, arrays: Arrays, op: RowOp) -> tuple[Batch, Arrays]:
    """The chosen rows of both halves."""
    split = tensor_columns(batch)
    if isinstance(batch, TensorDict) and not isinstance(arrays, RemoteArrays):
        taken = {key: columns.take_local(value, op) for key, value in split.items()}
        return (
            values.as_tensordict(taken, (len(op), *batch.batch_size[1:]), batch.device),
            {key: columns.take_local(value, op) for key, value in arrays.items()},
        )
    composed = columns.Composed()
    tensors = columns.take(split, op, composed)
    new_arrays = make_arrays(columns.take(array_columns(arrays), op, composed))
    return None if batch is None else make_batch(batch, tensors, len(op)), new_arrays


def row(batch: Batch, arrays: Arrays, index: int) -> tuple[TensorDict | None, dict[str, Any]]:
    """One row of both halves; of fields that lie elsewhere, only that row is fetched."""
    if isinstance(batch, RemoteBatch) or isinstance(arrays, RemoteArrays):
        batch, arrays = take(batch, arrays, Span(index, index + 1))
        prefetch(batch, arrays, None)
        index = 0
    item = {key: value[index] for key, value in arrays.items()}
    if batch is None:
        return None, item
    fields = {key: values.row(value, index) for key, value in batch.items()}
    return TensorDict(fields, batch_size=batch.batch_size[1:], device=batch.device), item


def select(batch: Batch, keys: Sequence[str] | None) -> Batch:
    """A new container with these keys; values are shared."""
    if batch is None:
        if keys:
            raise missing(keys[0], (), "batch")
        return None
    picked = pick(tensor_columns(batch), keys, "batch")
    return make_batch(batch, picked, int(batch.batch_size[0]))


def select_arrays(arrays: Arrays, keys: Sequence[str] | None) -> Arrays:
    """A new container with these keys; values are shared."""
    return make_arrays(pick(array_columns(arrays), keys, "non_tensor_batch"))


def pick(fields: Mapping[str, Any], keys: Sequence[str] | None, kind: str) -> dict[str, Any]:
    """A new dict with these keys. Raises `FieldError` for one that is not there."""
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
    present = tensor_columns(batch)
    for key in old:
        if key not in present:
            raise missing(key, present, "batch")
    renamed = [names.get(key, key) for key in present]
    if len(set(renamed)) != len(renamed):
        twice = next(key for key in renamed if renamed.count(key) > 1)
        raise FieldError(f"rename would give two fields the name '{twice}'", field=twice)
    if batch is None:
        return None
    fields = dict(zip(renamed, present.values(), strict=True))
    return make_batch(batch, fields, int(batch.batch_size[0]))


def prefetch(batch: Batch, arrays: Arrays, keys: Sequence[str] | None) -> None:
    """Fetches fields that lie elsewhere (all when `keys` is None), waiting once."""
    tensors, objects = tensor_columns(batch), array_columns(arrays)
    if keys is None:
        keys = [*tensors, *objects]
    wanted = []
    for key in [keys] if isinstance(keys, str) else keys:
        if key not in tensors and key not in objects:
            raise missing(key, [*tensors, *objects], "the batch")
        wanted += [(key, half[key]) for half in (tensors, objects) if key in half]
    columns.fetch([(key, column) for key, column in wanted if columns.is_remote(column)])


def deepcopy(batch: Batch, arrays: Arrays) -> tuple[Batch, Arrays]:
    """Private copies of everything that is local; references are immutable and are shared."""
    if batch is not None:
        fields = {key: columns.private(column) for key, column in tensor_columns(batch).items()}
        batch = make_batch(batch, fields, int(batch.batch_size[0]))
    return batch, make_arrays(
        {k: columns.private(column) for k, column in array_columns(arrays).items()}
    )
