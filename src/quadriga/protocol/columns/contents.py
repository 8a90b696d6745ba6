"""The contents of a batch without the class around them, and operations on its two halves.

The tensor half is a `TensorDict`, a `RemoteBatch` or None; the array half is a dict or a
`RemoteArrays`. Every operation works on columns and builds the simplest container for the result:
a real `TensorDict` and a plain dict unless some field is remote.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from tensordict import TensorDict

from quadriga.errors import ConflictError, FieldError, LengthError
from quadriga.protocol.columns import column as columns
from quadriga.protocol.columns.column import Column, Columns, is_remote, local_value
from quadriga.protocol.columns.remote_batch import RemoteArrays, RemoteBatch, as_array
from quadriga.protocol.values import operations
from quadriga.protocol.values.field_spec import Array
from quadriga.protocol.values.rows import ChunkPlans, RowRange, RowSelection

TensorHalf: TypeAlias = TensorDict | RemoteBatch | None
ArrayHalf: TypeAlias = dict[str, Array]
MetaInfo: TypeAlias = dict[str, Any]
V = TypeVar("V")

METRICS = "metrics"
"""The key of `meta_info` whose values `concat` joins to lists."""


@dataclass
class DataProtoItem:
    """One row of a batch, the result of `data[3]`.

    `batch`: the tensors of the row without their batch dimension, None if the batch has none;
    `non_tensor_batch`: the objects of the row; `meta_info`: that of the batch.
    """

    batch: TensorDict | Any = None  # None if the batch has no tensors
    non_tensor_batch: MetaInfo = field(default_factory=dict)
    meta_info: MetaInfo = field(default_factory=dict)


class Contents(NamedTuple):
    """What a batch holds: its tensor half, its array half and its settings."""

    batch: TensorHalf
    arrays: ArrayHalf
    meta: MetaInfo

    @property
    def rows(self) -> int:
        """The length of dimension 0; 0 if there is no field at all."""
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return next((length for _, length in lengths_of_arrays(self.arrays)), 0)


def tensor_columns(batch: TensorHalf) -> dict[str, Column]:
    """Return the columns of the tensor half; fetches nothing."""
    if batch is None:
        return {}
    return batch.columns if isinstance(batch, RemoteBatch) else {**operations.tensors_of(batch)}


def array_columns(arrays: ArrayHalf) -> dict[str, Column]:
    """Return the columns of the array half; fetches nothing."""
    return arrays.columns if isinstance(arrays, RemoteArrays) else dict(arrays)


def make_batch(like: TensorDict | RemoteBatch, fields: Columns, length: int) -> TensorHalf:
    """Return a tensor half of these columns with `length` rows, otherwise as `like`."""
    return tensor_half(fields, (length, *like.batch_size[1:]), like.device)


def tensor_half(fields: Columns, size: Sequence[int], device: torch.device | None) -> TensorHalf:
    """Return the tensor half of these columns: a `TensorDict` if all of them are local."""
    if _any_remote(fields):
        return RemoteBatch(fields, tuple(size), device)
    local = {key: local_value(column) for key, column in fields.items()}
    return TensorDict(dict(local), batch_size=list(size), device=device)


def make_arrays(fields: Columns) -> ArrayHalf:
    """Return the array half of these columns."""
    if _any_remote(fields):
        return RemoteArrays(fields)
    return {key: as_array(local_value(column)) for key, column in fields.items()}


def _any_remote(fields: Columns) -> bool:
    return any(map(is_remote, fields.values()))


def lengths_of_arrays(arrays: ArrayHalf) -> list[tuple[str, int]]:
    """Return key and rows of each array, -1 rows for one without dimensions.

    Raises `FieldError` for a value that is no array.
    """
    lengths = []
    for key, column in array_columns(arrays).items():
        if is_remote(column):
            lengths.append((key, len(column.row_map)))
        elif isinstance(value := local_value(column), np.ndarray):
            lengths.append((key, len(value) if value.ndim else -1))
        else:
            raise FieldError(
                f"field '{key}' of non_tensor_batch: expected a numpy array, got "
                f"{type(column).__name__}. Use np.array(items, dtype=object), or pass the list "
                "through from_dict",
                field=key,
            )
    return lengths


def check(contents: Contents) -> None:
    """Raise `LengthError` or `FieldError` unless all fields have one length and a known type."""
    batch, arrays, meta = contents
    if batch is not None and len(getattr(batch, "batch_size", ())) < 1:
        raise FieldError(
            f"batch: expected a TensorDict with at least one batch dimension, got {batch!r}"
        )
    for name, half in (("non_tensor_batch", arrays), ("meta_info", meta)):
        if not isinstance(half, dict):
            raise FieldError(f"{name}: expected a dict, got {type(half).__name__}", field=name)
    if not arrays:
        return
    lengths = lengths_of_arrays(arrays)
    first = "the batch" if batch is not None else f"'{lengths[0][0]}'"
    expected = contents.rows
    for key, count in lengths:
        if count != expected:
            raise LengthError(
                f"all fields of a batch have the same length: {first} has {expected} rows, "
                f"'{key}' has {count}",
                field=key,
            )


def take(
    batch: TensorHalf, arrays: ArrayHalf, selection: RowSelection
) -> tuple[TensorHalf, ArrayHalf]:
    """Return the selected rows of both halves."""
    if not isinstance(batch, RemoteBatch) and not isinstance(arrays, RemoteArrays):
        local = {key: as_array(columns.take_local(a, selection)) for key, a in arrays.items()}
        if batch is None:
            return None, local
        fields = operations.tensors_of(batch)
        taken_fields = {key: columns.take_local(v, selection) for key, v in fields.items()}
        size = (len(selection), *batch.batch_size[1:])
        return operations.as_tensordict(taken_fields, size, batch.device), local
    cache = columns.TakeCache()
    tensors = columns.take(tensor_columns(batch), selection, cache)
    taken = make_arrays(columns.take(array_columns(arrays), selection, cache))
    return None if batch is None else make_batch(batch, tensors, len(selection)), taken


def chunk(
    batch: TensorHalf, arrays: ArrayHalf, bounds: Sequence[int]
) -> list[tuple[TensorHalf, ArrayHalf]]:
    """Return the rows of both halves from each bound to the next."""
    pairs = list(pairwise(bounds))
    if not isinstance(batch, RemoteBatch) and not isinstance(arrays, RemoteArrays):
        return [take(batch, arrays, RowRange(start, stop)) for start, stop in pairs]
    plans: ChunkPlans = {}
    objects = map(make_arrays, columns.chunk(array_columns(arrays), bounds, plans))
    tensors = columns.chunk(tensor_columns(batch), bounds, plans)
    return [
        (None if batch is None else make_batch(batch, fields, stop - start), part)
        for fields, part, (start, stop) in zip(tensors, objects, pairs, strict=True)
    ]


def row(batch: TensorHalf, arrays: ArrayHalf, index: int) -> tuple[TensorDict | None, MetaInfo]:
    """Return one row of both halves; of remote fields only this row is fetched."""
    if isinstance(batch, RemoteBatch) or isinstance(arrays, RemoteArrays):
        # Taken first, so that prefetch fetches one row and the batch keeps its remote fields.
        batch, arrays = take(batch, arrays, RowRange(index, index + 1))
        prefetch(batch, arrays, None)
        index = 0
    item = {key: value[index] for key, value in arrays.items()}
    if batch is None:
        return None, item
    fields = {
        key: operations.row(local_value(value), index)
        for key, value in tensor_columns(batch).items()
    }
    return TensorDict(fields, batch_size=batch.batch_size[1:], device=batch.device), item


def select(batch: TensorHalf, keys: Sequence[str] | None) -> TensorHalf:
    """Return a new tensor half with these keys (all if None); values are shared."""
    if batch is None:
        if keys:
            raise missing(keys[0], (), "batch")
        return None
    picked = pick(tensor_columns(batch), keys, "batch")
    return make_batch(batch, picked, int(batch.batch_size[0]))


def select_arrays(arrays: ArrayHalf, keys: Sequence[str] | None) -> ArrayHalf:
    """Return a new array half with these keys (all if None); values are shared."""
    return make_arrays(pick(array_columns(arrays), keys, "non_tensor_batch"))


def pick(fields: Mapping[str, V], keys: Sequence[str] | None, kind: str) -> dict[str, V]:
    """Return a new dict with these keys (all if None). Raises `FieldError` for a missing key."""
    if isinstance(keys, str):
        keys = [keys]
    for key in keys or ():
        if key not in fields:
            raise missing(key, fields, kind)
    chosen = fields if keys is None else keys
    return {key: fields[key] for key in chosen}


def missing(key: str, known: Iterable[object], kind: str) -> FieldError:
    """Return the error for a missing key; it lists the keys that exist."""
    existing = ", ".join(map(str, known)) or "nothing"
    return FieldError(f"no field '{key}' in {kind}; it has: {existing}", field=key)


def rename(batch: TensorHalf, old: str | Sequence[str], new: str | Sequence[str]) -> TensorHalf:
    """Return the tensor half with keys renamed, in the same order."""
    old = [old] if isinstance(old, str) else list(old)
    new = [new] if isinstance(new, str) else list(new)
    if len(old) != len(new):
        raise LengthError(f"rename: expected as many new keys as old ones, got {old} and {new}")
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


def prefetch(batch: TensorHalf, arrays: ArrayHalf, keys: Sequence[str] | None) -> None:
    """Fetch these fields (all if None), waiting once. Raises `FieldError` for a missing key."""
    tensors, objects = tensor_columns(batch), array_columns(arrays)
    if keys is None:
        keys = [*tensors, *objects]
    wanted = []
    for key in [keys] if isinstance(keys, str) else keys:
        if key not in tensors and key not in objects:
            raise missing(key, [*tensors, *objects], "the batch")
        wanted += [(key, half[key]) for half in (tensors, objects) if key in half]
    columns.fetch([(key, column) for key, column in wanted if is_remote(column)])


def deepcopy(batch: TensorHalf, arrays: ArrayHalf) -> tuple[TensorHalf, ArrayHalf]:
    """Return private copies of all local values; references cannot change and are shared."""
    if batch is not None:
        fields = {key: columns.private(column) for key, column in tensor_columns(batch).items()}
        batch = make_batch(batch, fields, int(batch.batch_size[0]))
    copied = {key: columns.private(column) for key, column in array_columns(arrays).items()}
    return batch, make_arrays(copied)


def concat(parts: Sequence[Contents]) -> Contents:
    """Concatenate batches along their rows.

    Raises `FieldError` when a field is missing in one of them.
    """
    if not parts:
        raise LengthError("concat: expected at least one batch, got an empty list")
    halves = [None if part.batch is None else tensor_columns(part.batch) for part in parts]
    _check_same_keys(halves, "batch")
    _check_same_keys([part.arrays.keys() for part in parts], "non_tensor_batch")
    batch = parts[0].batch
    if batch is not None:
        fields = columns.concat([tensor_columns(part.batch) for part in parts])
        batch = make_batch(batch, fields, sum(part.rows for part in parts))
    arrays = columns.concat([array_columns(part.arrays) for part in parts])
    return Contents(batch, make_arrays(arrays), merge_meta([part.meta for part in parts]))


def _check_same_keys(keys: Sequence[Iterable[str] | None], kind: str) -> None:
    first = None if keys[0] is None else set(keys[0])
    for i, part in enumerate(keys[1:], start=1):
        other = None if part is None else set(part)
        if first == other:
            continue
        if first is None or other is None:
            with_tensors, without = (i, 0) if first is None else (0, i)
            raise FieldError(f"concat: part {with_tensors} has tensors and part {without} has none")
        key = sorted(first ^ other)[0]
        has, lacks = (0, i) if key in first else (i, 0)
        raise FieldError(
            f"concat: part {has} has field '{key}' of {kind}, part {lacks} does not. Select the "
            "common fields first",
            field=key,
        )


def merge_meta(metas: Sequence[Mapping[str, object]]) -> MetaInfo:
    """Merge the `meta_info` of several batches.

    Equal values are kept. Under `metrics`, dicts and lists of dicts become one dict of lists:
    [{"loss": 1.0}, {"loss": 3.0}] of two parts becomes {"loss": [1.0, 3.0]}. Raises
    `ConflictError` for any other key with different values.
    """
    merged: MetaInfo = {}
    metrics: list[Mapping[str, object]] = []
    for i, meta in enumerate(metas):
        for key, value in meta.items():
            if key == METRICS:
                metrics += _metric_dicts(value, i)
            elif key not in merged:
                merged[key] = value
            elif not operations.same(merged[key], value):
                raise meta_conflict(key, merged[key], value, f"part {i} of a concat")
    if metrics:
        joined: dict[str, list[object]] = {}
        for entry in metrics:
            for name, number in entry.items():
                joined.setdefault(name, []).append(number)
        merged[METRICS] = joined
    return merged


def _metric_dicts(value: object, part: int) -> list[Mapping[str, object]]:
    if value is None:
        return []
    entries: list[Any] = value if isinstance(value, list) else [value]
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise FieldError(
                f"meta_info['{METRICS}'] of part {part}: expected a dict or a list of dicts, got "
                f"{type(entry).__name__}",
                field=METRICS,
            )
    return entries


def meta_conflict(key: str, mine: object, other: object, where: str) -> ConflictError:
    """Return the error for a key of `meta_info` with two values."""
    return ConflictError(
        f"Conflicting values for meta_info key '{key}': different values in {where}: {show(mine)} "
        f"and {show(other)}",
        field=key,
    )


def show(value: object) -> str:
    """Return shape, dtype and the first values of anything, for messages."""
    shape = f"{operations.describe(value)} " if hasattr(value, "shape") else ""
    if isinstance(value, np.ndarray) and value.ndim:
        value = value.ravel()[:6].tolist()
    elif isinstance(value, torch.Tensor) and not value.is_nested and value.dim():
        value = value.detach().flatten()[:6].tolist()
    text = repr(value)
    return shape + (text if len(text) <= 80 else text[:77] + "...")
