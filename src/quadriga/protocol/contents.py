"""The two halves of a batch while some of its fields are remote.

`RemoteBatch` stands for a `TensorDict`, `RemoteArrays` for a dict of numpy arrays. Reading a field
fetches it.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from quadriga.errors import ConflictError, FieldError, LengthError
from quadriga.protocol import columns, contents as halves
from quadriga.protocol.columns import Column, Columns, is_remote, local_value
from quadriga.protocol.encoding import current_device
from quadriga.protocol.rows import RowRange, RowSelection
from quadriga.protocol.storage import Array
from quadriga.protocol.values import (
    LocalValue,
    as_tensordict,
    clone_value,
    describe_value,
    same,
    same_values,
    tensors_of,
    value_row,
)

Tensors = torch.Tensor | TensorDictBase
Entry: TypeAlias = torch.Tensor | Any
"""A tensor, or a nested `TensorDict` where the caller knows that the field is one."""
_ABSENT = object()
_READ_METHODS = frozenset(
    {
        *("to", "clone"),
        *("apply", "chunk", "split", "unbind", "view", "reshape", "flatten", "unflatten"),
        *("unsqueeze", "squeeze", "permute", "transpose", "expand", "gather", "cpu", "cuda"),
        *("detach", "contiguous", "consolidate", "to_dict", "numpy", "bytes", "sum", "mean", "std"),
        *("float", "double", "half", "bfloat16", "int", "isnan", "isfinite", "all", "any"),
    }
)
"""Methods of `TensorDict` that do not change it: called on `to_tensordict()`."""


def _fetch(held: Columns, keys: Iterable[str] | None) -> None:
    wanted = held if keys is None else keys
    columns.fetch([(key, c) for key in wanted if is_remote(c := held[key])])


class RemoteBatch:
    """Named tensors that share their first dimension(s), as in a `TensorDict`.

    Reading a key fetches that tensor once and keeps it. Setting a key replaces the tensor by a
    local one. Methods that only read (`apply`, `split`, `view`, …) fetch all tensors and call the
    method of `to_tensordict()`. Nothing else fetches.
    """

    def __init__(
        self,
        fields: Columns,
        batch_size: torch.Size | tuple[int, ...] | list[int],
        device: torch.device | None = None,
    ) -> None:
        self.columns: dict[str, Column] = dict(fields)
        self.batch_size = torch.Size(batch_size)
        self.device = device

    def __copy__(self) -> RemoteBatch:
        return RemoteBatch(self.columns, self.batch_size, self.device)

    def __deepcopy__(self, memo: dict[int, object]) -> RemoteBatch:
        copied = {key: columns.private(column) for key, column in self.columns.items()}
        return RemoteBatch(copied, self.batch_size, self.device)

    def __reduce__(self) -> tuple[object, ...]:
        held = {key: columns.for_pickle(key, column) for key, column in self.columns.items()}
        return _restore_batch, (held, tuple(self.batch_size), self.device and self.device.type)

    @property
    def shape(self) -> torch.Size:
        return self.batch_size

    @property
    def batch_dims(self) -> int:
        return len(self.batch_size)

    ndim = batch_dims

    def __len__(self) -> int:
        return self.batch_size[0]

    def keys(self) -> KeysView[str]:
        return self.columns.keys()

    def __contains__(self, key: object) -> bool:
        return key in self.columns

    def __getitem__(self, index: Any) -> Entry:
        """Return the tensor of a key. Other indices are those of `to_tensordict()`."""
        if not isinstance(index, str):
            return self.to_tensordict()[index]
        if index not in self.columns:
            raise self._missing(index)
        return columns.read(self.columns[index], index)

    def get(self, key: str, default: object = None) -> Entry:
        """Return the tensor of this key, or `default`."""
        return self[key] if key in self.columns else default

    def peek(self, key: str) -> Entry:
        """Return a copy of a tensor without keeping it: the field stays remote.

        What is written into the copy is not part of the batch.
        """
        if key not in self.columns:
            raise self._missing(key)
        column = self.columns[key]
        if is_remote(column):
            return column.unread().read(key)
        return clone_value(local_value(column))

    def __setitem__(self, key: str, value: Tensors) -> None:
        if not isinstance(value, torch.Tensor) and not hasattr(value, "batch_size"):
            raise FieldError(
                f"field '{key}' of a batch: expected a tensor, got {type(value).__name__}",
                field=key,
            )
        if tuple(value.shape[: self.batch_dims]) != tuple(self.batch_size):
            raise LengthError(
                f"all fields of a batch have the same length: the batch has "
                f"{list(self.batch_size)}, '{key}' has {list(value.shape)}",
                field=key,
            )
        self.columns[key] = value

    def set(self, key: str, value: Tensors, **_: object) -> RemoteBatch:
        self[key] = value
        return self

    def update(self, other: Mapping[str, Tensors]) -> RemoteBatch:
        for key in other.keys():  # noqa: SIM118  # iterating a TensorDict gives its rows
            self[key] = other[key]
        return self

    def setdefault(self, key: str, value: Tensors) -> Entry:
        if key not in self.columns:
            self[key] = value
        return self[key]

    def __delitem__(self, key: str) -> None:
        if key not in self.columns:
            raise self._missing(key)
        del self.columns[key]

    def pop(self, key: str, default: object = _ABSENT) -> Entry:
        """Remove a tensor and return it; fetches it."""
        if key not in self.columns and default is not _ABSENT:
            return default
        value = self[key]
        del self.columns[key]
        return value

    def select(self, *keys: str, strict: bool = True, **_: object) -> RemoteBatch:
        """Return a batch of these keys. The tensors are shared."""
        for key in keys:
            if strict and key not in self.columns:
                raise self._missing(key)
        picked = {key: self.columns[key] for key in keys if key in self.columns}
        return RemoteBatch(picked, self.batch_size, self.device)

    def exclude(self, *keys: str, **_: object) -> RemoteBatch:
        return self.select(*(key for key in self.columns if key not in keys))

    def rename_key_(self, old: str | tuple[str, ...], new: str | tuple[str, ...]) -> RemoteBatch:
        names = dict(zip(*((k,) if isinstance(k, str) else k for k in (old, new)), strict=True))
        for key in names:
            if key not in self.columns:
                raise self._missing(key)
        self.columns = {names.get(key, key): value for key, value in self.columns.items()}
        return self

    def fetch(self, keys: Iterable[str] | None = None) -> None:
        """Read these tensors (all if None), waiting once."""
        _fetch(self.columns, keys)

    def items(self, *_: object, **__: object) -> ItemsView[str, Entry]:
        return self._read_all().items()

    def values(self, *_: object, **__: object) -> ValuesView[Entry]:
        return self._read_all().values()

    def _read_all(self) -> dict[str, LocalValue]:
        self.fetch()
        return {key: local_value(column) for key, column in self.columns.items()}

    def to_tensordict(self) -> TensorDict:
        """Return a real `TensorDict` of the same tensors; fetches all of them."""
        return as_tensordict(self._read_all(), self.batch_size, self.device)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.to_tensordict())

    def __getattr__(self, name: str) -> Any:
        if name in _READ_METHODS:
            return getattr(self.to_tensordict(), name)
        raise AttributeError(
            f"a batch with remote tensors has no attribute '{name}'; fetch all tensors with "
            "to_tensordict() and use the attribute of the result"
        )

    def __repr__(self) -> str:
        lines = []
        for key, column in self.columns.items():
            if is_remote(column):
                shape, dtype = column.spec.describe(len(column.row_map))
                lines.append(f"{key}: {shape} {dtype}, remote")
            else:
                lines.append(f"{key}: {describe_value(local_value(column))}")
        return f"RemoteBatch(batch_size={list(self.batch_size)}, fields={{{'; '.join(lines)}}})"

    def _missing(self, key: str) -> FieldError:
        known = ", ".join(self.columns) or "nothing"
        return FieldError(f"no field '{key}' in batch; it has: {known}", field=key)


def _restore_batch(fields: Columns, batch_size: tuple[int, ...], device: str | None) -> RemoteBatch:
    return RemoteBatch(fields, batch_size, None if device is None else current_device(device))


def as_array(value: LocalValue) -> Array:
    """Return a value that is known to be an array."""
    assert isinstance(value, np.ndarray), type(value)
    return value


class RemoteArrays(dict[str, Array]):
    """A dict of numpy arrays. Entries may be `RemoteColumn`s, which reading replaces by arrays."""

    def __init__(self, fields: Columns | Iterable[tuple[str, Column]] = ()) -> None:
        super().__init__(fields)  # type: ignore[arg-type]  # reading gives arrays only

    @property
    def columns(self) -> dict[str, Column]:
        """The entries as they are, `RemoteColumn`s included; fetches nothing."""
        return {key: dict.__getitem__(self, key) for key in dict.keys(self)}

    def fetch(self, keys: Iterable[str] | None = None) -> None:
        """Read these arrays (all if None), waiting once."""
        _fetch(self.columns, keys)

    def __getitem__(self, key: str) -> Array:
        value: Column = dict.__getitem__(self, key)
        return as_array(columns.read(value, key))

    def __iter__(self) -> Iterator[str]:
        # Overridden so that dict(x) and {**x} call __getitem__ and do not copy RemoteColumns.
        return dict.__iter__(self)

    def get(self, key: str, default: object = None) -> Any:
        return self[key] if dict.__contains__(self, key) else default

    def pop(self, key: str, default: object = _ABSENT) -> Any:
        if key not in self and default is not _ABSENT:
            return default
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[str, Array]:
        key = list(self)[-1]
        return key, self.pop(key)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def items(self) -> ItemsView[str, Array]:  # type: ignore[override]  # of another class
        self.fetch()
        return {key: self[key] for key in self}.items()

    def values(self) -> ValuesView[Array]:  # type: ignore[override]  # of another class
        return dict(self.items()).values()

    def copy(self) -> RemoteArrays:
        return RemoteArrays(self.columns)

    def __or__(self, other: Mapping[str, Array]) -> RemoteArrays:  # type: ignore[override]
        return RemoteArrays(self.columns | dict(other))

    def __eq__(self, other: object) -> bool:
        return dict(self.items()) == other

    __hash__ = None

    def __copy__(self) -> RemoteArrays:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, object]) -> RemoteArrays:
        return RemoteArrays({key: columns.private(c) for key, c in self.columns.items()})

    def __reduce__(self) -> tuple[object, ...]:
        held = {key: columns.for_pickle(key, c) for key, c in self.columns.items()}
        return RemoteArrays, (held,)

    def __repr__(self) -> str:
        return repr({k: "remote" if is_remote(c) else self[k] for k, c in self.columns.items()})


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
    return batch.columns if isinstance(batch, RemoteBatch) else {**tensors_of(batch)}


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
    batch: TensorHalf, arrays: ArrayHalf, selections: Sequence[RowSelection]
) -> list[tuple[TensorHalf, ArrayHalf]]:
    """Return for each selection its rows of both halves; several selections are ranges."""
    if not isinstance(batch, RemoteBatch) and not isinstance(arrays, RemoteArrays):
        return [_take_local(batch, arrays, rows) for rows in selections]
    chosen = columns.Selections(selections)
    tensors = columns.take(tensor_columns(batch), chosen)
    objects = columns.take(array_columns(arrays), chosen)
    return [
        (None if batch is None else make_batch(batch, fields, len(rows)), make_arrays(part))
        for fields, part, rows in zip(tensors, objects, selections, strict=True)
    ]


def _take_local(
    batch: TensorDict | None, arrays: ArrayHalf, rows: RowSelection
) -> tuple[TensorHalf, ArrayHalf]:
    objects = {key: as_array(columns.take_local(a, rows)) for key, a in arrays.items()}
    if batch is None:
        return None, objects
    fields = {key: columns.take_local(v, rows) for key, v in tensors_of(batch).items()}
    return as_tensordict(fields, (len(rows), *batch.batch_size[1:]), batch.device), objects


def row(batch: TensorHalf, arrays: ArrayHalf, index: int) -> tuple[TensorDict | None, MetaInfo]:
    """Return one row of both halves; of remote fields only this row is fetched."""
    if isinstance(batch, RemoteBatch) or isinstance(arrays, RemoteArrays):
        # Taken first, so that prefetch fetches one row and the batch keeps its remote fields.
        ((batch, arrays),) = take(batch, arrays, [RowRange(index, index + 1)])
        prefetch(batch, arrays, None)
        index = 0
    item = {key: value[index] for key, value in arrays.items()}
    if batch is None:
        return None, item
    fields = {
        key: value_row(local_value(value), index) for key, value in tensor_columns(batch).items()
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
            elif not same(merged[key], value):
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
    shape = f"{describe_value(value)} " if hasattr(value, "shape") else ""
    if isinstance(value, np.ndarray) and value.ndim:
        value = value.ravel()[:6].tolist()
    elif isinstance(value, torch.Tensor) and not value.is_nested and value.dim():
        value = value.detach().flatten()[:6].tolist()
    text = repr(value)
    return shape + (text if len(text) <= 80 else text[:77] + "...")


def union_contents(mine: Contents, other: Contents) -> Contents:
    """Return the fields of both batches.

    Raises `LengthError` for different lengths, `ConflictError` for a key with two values.
    """
    if _has_fields(mine) and _has_fields(other) and mine.rows != other.rows:
        raise LengthError(
            f"union joins batches of the same length; this one has {mine.rows} rows, "
            f"the other has {other.rows}"
        )
    batch = _union_tensors(mine.batch, other.batch)
    arrays = _union_columns(halves.array_columns(mine.arrays), halves.array_columns(other.arrays))
    return Contents(batch, halves.make_arrays(arrays), union_meta(mine.meta, other.meta))


def _has_fields(contents: Contents) -> bool:
    return contents.batch is not None or bool(contents.arrays)


def _union_tensors(a: TensorHalf, b: TensorHalf) -> TensorHalf:
    if a is None or b is None:
        return halves.select(b if a is None else a, None)
    _check_sizes(a, b)
    fields = _union_columns(halves.tensor_columns(a), halves.tensor_columns(b))
    return halves.make_batch(a, fields, int(a.batch_size[0]))


def _union_columns(mine: Columns, other: Columns) -> dict[str, Column]:
    """Return all columns of both. Raises `ConflictError` for a key with two values."""
    for key, column in other.items():
        if key in mine and not columns.same(mine[key], column, key):
            raise _conflict(key, columns.read(mine[key], key), columns.read(column, key))
    return {**mine, **{key: column for key, column in other.items() if key not in mine}}


def _check_sizes(a: TensorDict | RemoteBatch, b: TensorDict | RemoteBatch) -> None:
    if tuple(a.batch_size) != tuple(b.batch_size):
        raise LengthError(
            f"union joins batches of the same size; got {list(a.batch_size)} and "
            f"{list(b.batch_size)}"
        )


def union_meta(a: Mapping[str, object], b: Mapping[str, object]) -> MetaInfo:
    """Return both dicts as one. Raises `ConflictError` for a key with two values."""
    for key, value in b.items():
        if key in a and not same(a[key], value):
            raise meta_conflict(key, a[key], value, "a union")
    return {**a, **b}


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the tensors of the second to the first and return it.

    A key of both keeps the tensor of the first, also where only the dtypes differ. Raises
    `LengthError` when batch sizes differ and `ConflictError` naming the key when both have it with
    different values (NaN equals NaN).
    """
    _check_sizes(tensor_dict1, tensor_dict2)
    known = set(tensor_dict1.keys())
    for key, _ in tensor_dict2.items():
        # `items` yields the containers of tensordict in place of lists of objects.
        if key in known and not same_values(tensor_dict1[key], tensor_dict2[key]):
            raise _conflict(key, tensor_dict1[key], tensor_dict2[key])
    for key, value in tensor_dict2.items():
        if key not in known:
            tensor_dict1[key] = value
    return tensor_dict1


def union_numpy_dict(
    tensor_dict1: dict[str, Array], tensor_dict2: dict[str, Array]
) -> dict[str, Array]:
    """Add the arrays of the second to the first and return it.

    Raises `ConflictError` naming the key when both have it with different values (NaN equals NaN,
    objects are compared deeply).
    """
    for key, value in tensor_dict2.items():
        if not isinstance(value, np.ndarray):
            raise FieldError(
                f"field '{key}': expected a numpy array, got {type(value).__name__}", field=key
            )
        if key in tensor_dict1 and not same(tensor_dict1[key], value):
            raise _conflict(key, tensor_dict1[key], value)
    for key, value in tensor_dict2.items():
        tensor_dict1.setdefault(key, value)
    return tensor_dict1


def _conflict(key: str, mine: object, other: object) -> ConflictError:
    return ConflictError(
        f"field '{key}' has different values in the two batches of a union: "
        f"{show(mine)} and {show(other)}. Rename one, or pop it first",
        field=key,
    )
