"""The contents of a batch: its tensors, its arrays and its settings, and the operations on them.

`RemoteBatch` stands for a `TensorDict` and `RemoteArrays` for a dict of numpy arrays while some of
their fields are remote. Reading a field fetches it.
"""

from __future__ import annotations

from collections.abc import (
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    MutableMapping,
    Sequence,
    ValuesView,
)
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Self, TypeAlias, TypeVar, cast

import numpy as np
import torch

from quadriga.errors import ConflictError, FieldError, LengthError
from quadriga.protocol import columns
from quadriga.protocol.columns import (
    Column,
    Columns,
    RemoteColumn,
    current_device,
    is_remote,
    local_value,
)
from quadriga.protocol.storage import Array, RowSelection
from quadriga.protocol.tensordicts import TensorDict, TensorDictBase
from quadriga.protocol.values import (
    LocalValue,
    clone_value,
    describe_value,
    dtype_of,
    nbytes_of,
    same,
    shape_of,
    tensors_of,
    value_row,
)

Tensors = torch.Tensor | TensorDictBase
Entry: TypeAlias = torch.Tensor | Any
"""A tensor, or a nested `TensorDict` where the caller knows that the field is one."""
V = TypeVar("V")
_ABSENT = object()


class _RemoteFields(Generic[V]):
    """Named fields of one length. Reading one fetches it once; `columns` has them unread."""

    columns: dict[str, Column]

    # No base class: a batch is no `Mapping`, because iterating over it gives its rows.
    def get(self, key: str, default: Any = None) -> Any:
        """Return a field, or `default` if there is no such field. A failed read is an error."""
        if key in self:
            return self[key]
        return default

    setdefault: Any = MutableMapping.setdefault

    def keys(self) -> KeysView[str]:
        return self.columns.keys()

    def __contains__(self, key: object) -> bool:
        return key in self.columns

    def __getitem__(self, key: str) -> V:
        return cast(V, columns.read(self.column(key), key))

    def __delitem__(self, key: str) -> None:
        del self.columns[self._known(key)]

    def column(self, key: str) -> Column:
        """Return a field unread. Raises `FieldError` for a missing key."""
        return self.columns[self._known(key)]

    def _known(self, key: str) -> str:
        if key not in self.columns:
            raise missing(key, self.columns, "batch")
        return key

    def pop(self, key: str, default: Any = _ABSENT) -> Any:
        """Remove a field and return it; fetches it."""
        if key not in self.columns and default is not _ABSENT:
            return default
        value = self[key]
        del self.columns[key]
        return value

    def update(self, other: Mapping[str, V]) -> Self:
        for key in other.keys():  # noqa: SIM118  # iterating a TensorDict gives its rows
            self[key] = other[key]
        return self

    def __setitem__(self, key: str, value: V) -> None:
        self.columns[key] = cast(LocalValue, value)

    def items(self, *_: object, **__: object) -> ItemsView[str, V]:
        return self.read_all().items()

    def values(self, *_: object, **__: object) -> ValuesView[V]:
        return self.read_all().values()

    def read_all(self) -> dict[str, V]:
        """Return all fields, waiting once."""
        columns.fetch([(key, column) for key, column in self.columns.items() if is_remote(column)])
        return {key: cast(V, local_value(column)) for key, column in self.columns.items()}


class RemoteBatch(_RemoteFields[Entry]):
    """Named tensors that share their first dimension(s), as in a `TensorDict`.

    Reading a key fetches that tensor once and keeps it. Setting a key replaces the tensor by a
    local one. Methods that only read (`apply`, `split`, `view`, …) fetch all tensors and call the
    method of `to_tensordict()`. Nothing else fetches.
    """

    def __init__(
        self,
        fields: dict[str, Column],
        batch_size: Sequence[int],
        device: torch.device | None = None,
    ) -> None:
        self.columns = fields
        self.batch_size = torch.Size(batch_size)
        self.device = device

    def __copy__(self) -> RemoteBatch:
        return RemoteBatch(dict(self.columns), self.batch_size, self.device)

    def __deepcopy__(self, memo: dict[int, object]) -> RemoteBatch:
        return RemoteBatch(private(self.columns), self.batch_size, self.device)

    def __reduce__(self) -> tuple[object, ...]:
        device = self.device and self.device.type
        return _restore_batch, (_pickled(self.columns), tuple(self.batch_size), device)

    @property
    def shape(self) -> torch.Size:
        return self.batch_size

    @property
    def batch_dims(self) -> int:
        return len(self.batch_size)

    ndim = batch_dims

    def __len__(self) -> int:
        return self.batch_size[0]

    def __getitem__(self, index: Any) -> Entry:
        """Return the tensor of a key. Other indices are those of `to_tensordict()`."""
        if not isinstance(index, str):
            return self.to_tensordict()[index]
        return super().__getitem__(index)

    def peek(self, key: str) -> Entry:
        """Return a copy of a tensor without keeping it: the field stays remote.

        What is written into the copy is not part of the batch.
        """
        column = self.column(key)
        if is_remote(column):
            return column.unread().read(key)
        return clone_value(local_value(column))

    def __setitem__(self, key: str, value: Entry) -> None:
        if not isinstance(value, torch.Tensor) and not hasattr(value, "batch_size"):
            raise FieldError(
                f"field '{key}' of a batch: expected a tensor, got {type(value).__name__}",
                field=key,
            )
        if tuple(value.shape[: self.batch_dims]) != tuple(self.batch_size):
            raise unequal("the batch", list(self.batch_size), key, list(value.shape))
        self.columns[key] = value

    def set(self, key: str, value: Tensors, **_: object) -> RemoteBatch:
        self[key] = value
        return self

    def select(self, *keys: str, strict: bool = True, **_: object) -> RemoteBatch:
        """Return a batch of these keys. The tensors are shared."""
        kept = [self._known(key) if strict else key for key in keys]
        picked = {key: self.columns[key] for key in kept if key in self.columns}
        return RemoteBatch(picked, self.batch_size, self.device)

    def exclude(self, *keys: str, **_: object) -> RemoteBatch:
        return self.select(*(key for key in self.columns if key not in keys))

    def rename_key_(self, old: str | tuple[str, ...], new: str | tuple[str, ...]) -> RemoteBatch:
        self.columns = renamed(self.columns, old, new)
        return self

    def to_tensordict(self) -> TensorDict:
        """Return a real `TensorDict` of the same tensors; fetches all of them."""
        return TensorDict(self.read_all(), batch_size=self.batch_size, device=self.device)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.to_tensordict())

    def __getattr__(self, name: str) -> Any:
        # In-place methods end in an underscore, as in torch.
        if not name.startswith("_") and not name.endswith("_") and hasattr(TensorDict, name):
            return getattr(self.to_tensordict(), name)
        raise AttributeError(
            f"a batch with remote tensors has no attribute '{name}'; fetch all tensors with "
            "to_tensordict() and use the attribute of the result"
        )

    def __repr__(self) -> str:
        shown = "; ".join(f"{key}: {_shown(column)}" for key, column in self.columns.items())
        return f"RemoteBatch(batch_size={list(self.batch_size)}, fields={{{shown}}})"


def _shown(column: Column) -> str:
    shape, dtype = shape_and_dtype(column)
    return f"{shape} {dtype}{', remote' if is_remote(column) else ''}"


def _restore_batch(
    fields: dict[str, Column], batch_size: tuple[int, ...], device: str | None
) -> RemoteBatch:
    return RemoteBatch(fields, batch_size, None if device is None else current_device(device))


class RemoteArrays(_RemoteFields[Array], dict[str, Array]):  # type: ignore[misc]  # other views
    """A dict of numpy arrays. Its fields are in `columns`; the dict itself is empty."""

    popitem: Any = MutableMapping.popitem
    __eq__: Any = MutableMapping.__eq__
    __hash__ = None

    def __init__(self, fields: Columns | Iterable[tuple[str, Column]] = ()) -> None:
        super().__init__()
        self.columns = dict(fields)

    def __len__(self) -> int:
        return len(self.columns)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def copy(self) -> RemoteArrays:
        return RemoteArrays(self.columns)

    __copy__ = copy

    def __or__(self, other: Mapping[str, Array]) -> RemoteArrays:  # type: ignore[override]
        return RemoteArrays(self.columns | dict(other))

    def __deepcopy__(self, memo: dict[int, object]) -> RemoteArrays:
        return RemoteArrays(private(self.columns))

    def __reduce__(self) -> tuple[object, ...]:
        return RemoteArrays, (_pickled(self.columns),)

    def __repr__(self) -> str:
        return repr(
            {k: "remote" if is_remote(c) else local_value(c) for k, c in self.columns.items()}
        )


def private(fields: Columns) -> dict[str, Column]:
    """Return deep copies of local values; references cannot change and are shared."""
    return {
        key: c.unread() if is_remote(c) else clone_value(local_value(c))
        for key, c in fields.items()
    }


def _pickled(fields: Columns) -> dict[str, RemoteColumn]:
    return {key: columns.for_pickle(key, column) for key, column in fields.items()}


TensorHalf: TypeAlias = TensorDict | RemoteBatch | None
ArrayHalf: TypeAlias = dict[str, Array]
MetaInfo: TypeAlias = dict[str, Any]

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
        return next((length for _, length in _lengths(self.arrays)), 0)

    def halves(self) -> tuple[dict[str, Column], dict[str, Column]]:
        """Return the columns of both halves; fetches nothing."""
        return tensor_columns(self.batch), array_columns(self.arrays)

    def columns(self) -> dict[str, Column]:
        """Return the columns of both halves by name."""
        tensors, arrays = self.halves()
        return {**tensors, **arrays}


def tensor_columns(batch: TensorHalf) -> dict[str, Column]:
    """Return the columns of the tensor half; fetches nothing."""
    if batch is None:
        return {}
    return batch.columns if isinstance(batch, RemoteBatch) else {**tensors_of(batch)}


def array_columns(arrays: ArrayHalf) -> dict[str, Column]:
    """Return the columns of the array half; fetches nothing."""
    return arrays.columns if isinstance(arrays, RemoteArrays) else {**arrays}


def make_batch(like: TensorHalf, fields: dict[str, Column], length: int) -> TensorHalf:
    """Return a tensor half of these columns with `length` rows, otherwise as `like`."""
    if like is None:
        return None
    return tensor_half(fields, (length, *like.batch_size[1:]), like.device)


def tensor_half(
    fields: dict[str, Column], size: Sequence[int], device: torch.device | None
) -> TensorHalf:
    """Return the tensor half of these columns: a `TensorDict` if all of them are local."""
    if any(map(is_remote, fields.values())):
        return RemoteBatch(fields, size, device)
    local = {key: local_value(column) for key, column in fields.items()}
    return TensorDict(local, batch_size=list(size), device=device)


def make_arrays(fields: Columns) -> ArrayHalf:
    """Return the array half of these columns."""
    if any(map(is_remote, fields.values())):
        return RemoteArrays(fields)
    return {key: cast(Array, local_value(column)) for key, column in fields.items()}


def _lengths(arrays: ArrayHalf) -> Iterator[tuple[str, int]]:
    """Yield key and rows of each array, -1 rows for one without dimensions.

    Raises `FieldError` for a value that is no array.
    """
    for key, column in array_columns(arrays).items():
        if is_remote(column):
            yield key, len(column.row_map)
        elif isinstance(value := local_value(column), np.ndarray):
            yield key, len(value) if value.ndim else -1
        else:
            raise FieldError(
                f"field '{key}' of non_tensor_batch: expected a numpy array, got "
                f"{type(column).__name__}. Use np.array(items, dtype=object), or pass the list "
                "through from_dict",
                field=key,
            )


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
    expected = contents.rows
    for key, count in _lengths(arrays):
        if count != expected:
            first = "the batch" if batch is not None else f"'{next(iter(arrays))}'"
            raise unequal(first, f"{expected} rows", key, count)


def unequal(first: str, expected: object, key: str, got: object) -> LengthError:
    """Return the error for two fields of different lengths."""
    return LengthError(
        f"all fields of a batch have the same length: {first} has {expected}, '{key}' has {got}",
        field=key,
    )


def take(
    contents: Contents, selections: Sequence[RowSelection]
) -> list[tuple[TensorHalf, ArrayHalf]]:
    """Return for each selection its rows of both halves."""
    tensors, objects = columns.take([*contents.halves()], selections)
    return [
        (make_batch(contents.batch, fields, len(rows)), make_arrays(part))
        for fields, part, rows in zip(tensors, objects, selections, strict=True)
    ]


def row(batch: TensorHalf, arrays: ArrayHalf, index: int) -> tuple[TensorDict | None, MetaInfo]:
    """Return one row of both halves; of remote fields only this row is fetched."""
    if isinstance(batch, RemoteBatch) or isinstance(arrays, RemoteArrays):
        # Taken first, so that prefetch fetches one row and the batch keeps its remote fields.
        ((batch, arrays),) = take(Contents(batch, arrays, {}), [range(index, index + 1)])
        prefetch(batch, arrays, None)
        index = 0
    item = {key: value[index] for key, value in arrays.items()}
    if batch is None:
        return None, item
    fields = {
        key: value_row(local_value(value), index) for key, value in tensor_columns(batch).items()
    }
    return TensorDict(fields, batch_size=batch.batch_size[1:], device=batch.device), item


def pick(fields: Mapping[str, V], keys: Sequence[str] | None, kind: str) -> dict[str, V]:
    """Return a new dict with these keys (all if None). Raises `FieldError` for a missing key."""
    if isinstance(keys, str):
        keys = [keys]
    for key in keys or ():
        if key not in fields:
            raise missing(key, fields, kind)
    return {key: fields[key] for key in (fields if keys is None else keys)}


def missing(key: str, known: Iterable[object], kind: str) -> FieldError:
    """Return the error for a missing key; it lists the keys that exist."""
    existing = ", ".join(map(str, known)) or "nothing"
    return FieldError(f"no field '{key}' in {kind}; it has: {existing}", field=key)


def renamed(
    fields: Mapping[str, V], old: str | Sequence[str], new: str | Sequence[str]
) -> dict[str, V]:
    """Return the fields with keys renamed, in the same order."""
    old, new = ([keys] if isinstance(keys, str) else list(keys) for keys in (old, new))
    if len(old) != len(new):
        raise LengthError(f"rename: expected as many new keys as old ones, got {old} and {new}")
    pick(fields, old, "batch")
    names = dict(zip(old, new, strict=True))
    found: dict[str, V] = {}
    for key, value in fields.items():
        name = names.get(key, key)
        if name in found:
            raise FieldError(f"rename would give two fields the name '{name}'", field=name)
        found[name] = value
    return found


def prefetch(batch: TensorHalf, arrays: ArrayHalf, keys: Sequence[str] | None) -> None:
    """Fetch these fields (all if None), waiting once. Raises `FieldError` for a missing key."""
    tensors, objects = tensor_columns(batch), array_columns(arrays)
    wanted = pick({**tensors, **objects}, keys, "the batch")
    found = [(key, half[key]) for key in wanted for half in (tensors, objects) if key in half]
    columns.fetch([(key, column) for key, column in found if is_remote(column)])


def concat(parts: Sequence[Contents]) -> Contents:
    """Concatenate batches along their rows.

    Raises `FieldError` when a field is missing in one of them.
    """
    if not parts:
        raise LengthError("concat: expected at least one batch, got an empty list")
    tensors = [tensor_columns(part.batch) for part in parts]
    arrays = [array_columns(part.arrays) for part in parts]
    for i, part in enumerate(parts[1:], start=1):
        if (part.batch is None) != (parts[0].batch is None):
            with_tensors, without = (i, 0) if parts[0].batch is None else (0, i)
            raise FieldError(f"concat: part {with_tensors} has tensors and part {without} has none")
        for half, kind in ((tensors, "batch"), (arrays, "non_tensor_batch")):
            for key in sorted(half[0].keys() ^ half[i].keys()):
                has, lacks = (0, i) if key in half[0] else (i, 0)
                raise FieldError(
                    f"concat: part {has} has field '{key}' of {kind}, part {lacks} does not. "
                    "Select the common fields first",
                    field=key,
                )
    rows = sum(part.rows for part in parts)
    batch = make_batch(parts[0].batch, columns.concat(tensors), rows)
    meta = merge_meta([part.meta for part in parts])
    return Contents(batch, make_arrays(columns.concat(arrays)), meta)


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
    filled = [part for part in (mine, other) if part.batch is not None or part.arrays]
    if len({part.rows for part in filled}) > 1:
        raise LengthError(
            f"union joins batches of the same length; this one has {mine.rows} rows, "
            f"the other has {other.rows}"
        )
    like = mine.batch if mine.batch is not None else other.batch
    if mine.batch is not None and other.batch is not None:
        _check_sizes(mine.batch, other.batch)
    tensors = _union(tensor_columns(mine.batch), tensor_columns(other.batch))
    arrays = _union(array_columns(mine.arrays), array_columns(other.arrays))
    for key, value in other.meta.items():
        if key in mine.meta and not same(mine.meta[key], value):
            raise meta_conflict(key, mine.meta[key], value, "a union")
    batch = make_batch(like, tensors, mine.rows if mine.batch is not None else other.rows)
    return Contents(batch, make_arrays(arrays), {**mine.meta, **other.meta})


def _union(mine: Columns, other: Columns) -> dict[str, Column]:
    """Return all columns of both. Raises `ConflictError` for a key with two values."""
    for key, column in other.items():
        if key in mine and not columns.same(mine[key], column, key):
            values = [columns.read(half[key], key) for half in (mine, other)]
            raise ConflictError(
                f"field '{key}' has different values in the two batches of a union: "
                f"{show(values[0])} and {show(values[1])}. Rename one, or pop it first",
                field=key,
            )
    return {**mine, **{key: other[key] for key in other if key not in mine}}


def _check_sizes(a: TensorDict | RemoteBatch, b: TensorDict | RemoteBatch) -> None:
    if tuple(a.batch_size) != tuple(b.batch_size):
        raise LengthError(
            f"union joins batches of the same size; got {list(a.batch_size)} and "
            f"{list(b.batch_size)}"
        )


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Add the tensors of the second to the first and return it.

    A key of both keeps the tensor of the first, also where only the dtypes differ. Raises
    `LengthError` when batch sizes differ and `ConflictError` naming the key when both have it with
    different values (NaN equals NaN).
    """
    _check_sizes(tensor_dict1, tensor_dict2)
    # By `[]`: `items` yields the containers of tensordict in place of lists of objects.
    halves = [{str(key): half[key] for key in half.keys()} for half in (tensor_dict1, tensor_dict2)]  # noqa: SIM118
    for key in _union(*halves).keys() - halves[0].keys():
        tensor_dict1[key] = tensor_dict2.get(key)
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
    joined = _union(tensor_dict1, tensor_dict2)
    for key in joined:
        tensor_dict1.setdefault(key, cast(Array, joined[key]))
    return tensor_dict1


_HEAD = ("field", "shape", "dtype", "bytes", "stored", "written by")


def table(contents: Contents) -> str:
    """Return one line per field: name, shape, dtype, bytes, where it is stored, who wrote it.

    Bytes of local object arrays count the references only. The writer of a field is known while it
    is remote, or was read in this batch.
    """
    fields = contents.columns()
    lines = [_HEAD, *(_line(key, column) for key, column in fields.items())]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
    text = [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) for line in lines
    ]
    total = sum(map(nbytes, fields.values()))
    remote = sum(nbytes(column) for column in fields.values() if is_remote(column))
    head = f"{contents.rows} rows, {len(fields)} fields, {total:,} bytes, {remote:,} of them remote"
    meta = f"meta_info: {', '.join(map(str, contents.meta)) or 'nothing'}"
    return "\n".join([head, *(line.rstrip() for line in text), meta])


def _line(key: str, column: Column) -> tuple[str, ...]:
    shape, dtype = shape_and_dtype(column)
    return key, shape, dtype, f"{nbytes(column):,}", *_stored_and_written(column)


def shape_and_dtype(column: Column) -> tuple[str, str]:
    """Return shape and dtype of a field as text, `("[8, *, 2]", "float32")`; `*` is ragged."""
    if not is_remote(column):
        return shape_of(local_value(column)), dtype_of(local_value(column))
    spec = column.spec
    dims: list[object] = [len(column.row_map), *spec.tail]
    if spec.kind == "jagged":
        dims.insert(spec.ragged_dim, "*")
    return f"[{', '.join(map(str, dims))}]", spec.dtype or spec.kind


def nbytes(column: Column) -> int:
    """Return the bytes of a column; fetches nothing."""
    return column.nbytes() if is_remote(column) else nbytes_of(local_value(column))


def _stored_and_written(column: Column) -> tuple[str, str]:
    """Return `actor[0-3] on 10.0.0.1` or "local", and `actor.compute_log_prob[0-3]`, "" if it is
    not known who wrote it."""
    if not isinstance(column, RemoteColumn):
        return "local", ""
    origins = [shard.origin for shard in column.row_map.shards]
    written = _by_name([(f"{o.role}.{o.method}".rstrip("."), o.rank) for o in origins])
    if not is_remote(column):
        return "local", written
    nodes = sorted({origin.node for origin in origins if origin.node})
    stored = _by_name([(origin.role, origin.rank) for origin in origins])
    return stored + (f" on {', '.join(nodes)}" if nodes else ""), written


def _by_name(pairs: Iterable[tuple[str, int]]) -> str:
    """Return the ranks of each name: `actor[0-3,6], critic[0]`."""
    found: dict[str, list[list[int]]] = {}
    for name, rank in sorted(set(pairs)):
        # 0 1 2 3 6 → [0, 3], [6] → "0-3,6"
        ranges = found.setdefault(name, [])
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], rank]
        else:
            ranges.append([rank])
    return ", ".join(
        f"{name}[{','.join('-'.join(map(str, pair)) for pair in ranges)}]"
        for name, ranges in found.items()
    )
