"""`DataProto`, the container of a batch, and functions that pad, collate and fold batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from quadriga.errors import FieldError, LengthError
from quadriga.protocol import columns, contents as halves, disk
from quadriga.protocol.columns import Column, local_value
from quadriga.protocol.contents import (
    ArrayHalf,
    Contents,
    DataProtoItem,
    MetaInfo,
    RemoteBatch,
    TensorHalf,
    Tensors,
)
from quadriga.protocol.message import Message, message_of, unpack
from quadriga.protocol.storage import Array, RowSelection, chunk_bounds
from quadriga.protocol.tensordicts import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from quadriga.protocol.values import (
    LocalValue,
    RowIndex,
    describe_value,
    from_index,
    from_slice,
    is_jagged,
    object_array,
    row_number,
    tensors_of,
)


class DataProtoConfig:
    """Settings of `DataProto` for this process.

    `auto_padding`: if True, a batch that does not divide by the number of ranks is padded for the
    call, and the result is unpadded. `from_dict(..., auto_padding=True)` sets the same for a single
    batch. Default: False.
    """

    auto_padding: bool = False
    auto_padding_key = "_auto_padding"
    auto_padding_keys = (auto_padding_key, "_verl_auto_padding")
    """The keys of `meta_info` that allow padding. Programs written for verl set the second one."""


MaybeNone: TypeAlias = Any
"""None where a batch has no tensors. Not spelled `None`, so that code which knows that its batch
has tensors can write `data.batch["values"]` (the convention of typeshed's `MaybeNone`)."""


_MEMBERS = frozenset(("batch", "non_tensor_batch", "meta_info"))


class DataProto:
    """A batch: tensors, arrays of the same length, and settings.

    - `batch`: a `TensorDict` whose tensors share dimension 0 ([N, ...]) or a dict that becomes one,
      None without tensors, a `RemoteBatch` (same reading interface) while some are remote.
    - `non_tensor_batch`: dict of numpy arrays [N, ...], usually of dtype object.
    - `meta_info`: a plain dict; not split; merged by `concat`.

    Attributes of a subclass are kept by every operation (`concat` keeps those of the first batch)
    and are sent with the batch, as `meta_info` is. Raises `LengthError` or `FieldError` at
    construction when the parts do not fit together.
    """

    batch: TensorDict | RemoteBatch | MaybeNone
    non_tensor_batch: ArrayHalf
    meta_info: MetaInfo

    def __init__(
        self,
        batch: TensorHalf | dict[str, torch.Tensor] = None,
        non_tensor_batch: ArrayHalf | None = None,
        meta_info: MetaInfo | None = None,
    ) -> None:
        if type(batch) is dict:
            batch = check_dicts(batch, {}, 1)[0]
        self.batch = batch
        self.non_tensor_batch = {} if non_tensor_batch is None else non_tensor_batch
        self.meta_info = {} if meta_info is None else meta_info
        self.check_consistency()

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor | TensorDictBase] | None = None,
        non_tensors: Mapping[str, object] | None = None,
        meta_info: MetaInfo | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """Return a batch of a dict of tensors and a dict of arrays or lists.

        `auto_padding=True` allows calls to pad this batch (noted in `meta_info`). Raises
        `LengthError` naming both fields when lengths differ, `FieldError` for other types.
        """
        meta = dict(meta_info or {})
        if auto_padding:
            meta[DataProtoConfig.auto_padding_key] = True
        batch, arrays = check_dicts(tensors or {}, non_tensors or {}, num_batch_dims)
        return cls(batch, arrays, meta)

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, object],
        meta_info: MetaInfo | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """Return a batch of one dict; tensors, and arrays or lists, are separated by type."""
        _check_mapping("data", data)
        kinds = torch.Tensor | TensorDictBase
        tensors = {key: value for key, value in data.items() if isinstance(value, kinds)}
        arrays = {key: value for key, value in data.items() if key not in tensors}
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls,
        tensor_dict: TensorDictBase | None = None,
        meta_info: MetaInfo | None = None,
        num_batch_dims: int = 1,
    ) -> Self:
        """Return a batch of a `TensorDict`. A `NonTensorStack` becomes an array, a `NonTensorData`
        becomes an entry of `meta_info`."""
        meta = dict(meta_info or {})
        if tensor_dict is None:
            return cls(None, {}, meta)
        tensors: dict[str, Tensors] = {}
        arrays: ArrayHalf = {}
        for key, value in tensors_of(tensor_dict).items():
            if isinstance(value, NonTensorStack):
                arrays[key] = object_array(value.tolist())
            elif isinstance(value, NonTensorData):
                meta[key] = value.data
            else:
                tensors[key] = value
        batch, _ = check_dicts(tensors, {}, num_batch_dims)
        if batch is None and not arrays and tensor_dict.batch_size:
            batch = TensorDict({}, batch_size=tensor_dict.batch_size[:num_batch_dims])
        return cls(batch, arrays, meta)

    def to_tensordict(self) -> TensorDict:
        """Return one `TensorDict`, with arrays as `NonTensorStack` and settings as `NonTensorData`.

        The inverse of `from_tensordict`. Fetches every field. Raises `FieldError` when two of them
        have the same name.
        """
        fields: dict[str, object] = {} if self.batch is None else dict(self.batch.items())
        size = [len(self)] if self.batch is None else list(self.batch.batch_size)
        arrays = {
            key: NonTensorStack(*map(NonTensorData, array))
            for key, array in self.non_tensor_batch.items()
        }
        meta = {key: NonTensorData(v, batch_size=size) for key, v in self.meta_info.items()}
        for half in (arrays, meta):
            if taken := sorted(half.keys() & fields.keys()):
                text = f"'{taken[0]}' names two fields of different kinds; a TensorDict has one"
                raise FieldError(f"{text} name space", field=taken[0])
            fields |= half
        return TensorDict(fields, batch_size=size)

    def check_consistency(self) -> None:
        """Raise `LengthError` or `FieldError` unless all fields have one length and known types."""
        halves.check(self._contents)

    @property
    def contents(self) -> Contents:
        """The three parts without the class around them, checked as `check_consistency` does: a
        program can put arrays of any length into the dict of arrays."""
        self.check_consistency()
        return self._contents

    @property
    def _contents(self) -> Contents:
        return Contents(self.batch, self.non_tensor_batch, self.meta_info)

    def with_contents(
        self, batch: TensorHalf, arrays: ArrayHalf, meta: MetaInfo | None = None
    ) -> Self:
        """Return a batch like this one with these halves; `meta_info` is copied if None."""
        made = type(self).__new__(type(self))  # not __init__, whose arguments are those of a user
        vars(made).update(vars(self))
        made.batch, made.non_tensor_batch = batch, arrays
        made.meta_info = dict(self.meta_info) if meta is None else meta
        return made

    def __len__(self) -> int:
        return self._contents.rows

    def __repr__(self) -> str:
        tensors = [] if self.batch is None else list(self.batch.keys())
        return (
            f"{type(self).__name__}(rows={len(self)}, batch={tensors}, "
            f"non_tensor_batch={list(self.non_tensor_batch)}, meta_info={list(self.meta_info)})"
        )

    def __getitem__(self, index: Any) -> Any:
        """Return a `DataProtoItem` for `data[int]`, a batch for slices, lists, arrays and masks."""
        row = row_number(index, len(self))
        if row is None:
            return self.take_rows(from_index(index, len(self)))
        return DataProtoItem(*halves.row(self.batch, self.non_tensor_batch, row), self.meta_info)

    def __iter__(self) -> Iterator[DataProtoItem]:
        self.prefetch()
        for i in range(len(self)):
            yield self[i]

    def take_rows(self, selection: RowSelection) -> Self:
        """Return the selected rows. Fetches nothing."""
        return self._parts([selection])[0]

    def _parts(self, selections: Sequence[RowSelection]) -> list[Self]:
        if not selections:
            return []
        parts = halves.take(self.contents, selections)
        return [self.with_contents(*part) for part in parts]

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> Self:
        """Return rows `start:end:step`. Local tensors are views if `step` is 1."""
        return self.take_rows(from_slice(slice(start, end, step), len(self)))

    def select_idxs(self, idxs: RowIndex) -> Self:
        """Return the rows of a list, numpy array or tensor of row numbers, or of a bool mask."""
        return self.take_rows(from_index(idxs, len(self)))

    def reorder(self, indices: RowIndex) -> None:
        """Replace the rows by those of `indices` (length N or any other), in place."""
        self._take_in_place(from_index(indices, len(self)))

    def _take_in_place(self, selection: RowSelection) -> None:
        (taken,) = halves.take(self.contents, [selection])
        self.batch, self.non_tensor_batch = taken

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Repeat every row `repeat_times` times: aabb if interleaved, abab if not."""
        chosen = np.arange(len(self), dtype=np.int64)
        chosen = np.repeat(chosen, repeat_times) if interleave else np.tile(chosen, repeat_times)
        return self.take_rows(chosen)

    def sample_level_repeat(self, repeat_times: Sequence[int] | torch.Tensor | np.ndarray) -> Self:
        """Repeat row `i` `repeat_times[i]` times. Raises `LengthError` unless every row has one."""
        counts: Any = np.asarray(repeat_times)
        if counts.ndim != 1 or (counts.size and counts.dtype.kind not in "iu"):
            raise FieldError(f"repeat_times: expected one integer per row, got {repeat_times!r}")
        if len(counts) != len(self) or (counts < 0).any():
            wanted = f"{len(self)} counts of 0 or more, one for each row"
            raise LengthError(f"repeat_times: expected {wanted}, got {counts}")
        rows = np.arange(len(self), dtype=np.int64)
        return self.take_rows(np.repeat(rows, counts.astype(np.int64)))

    def chunk(self, chunks: int) -> list[Self]:
        """Split into `chunks` parts of equal length, in order.

        With padding enabled lengths may differ by one, longer parts first. Otherwise a length
        that does not divide raises `LengthError`.
        """
        bounds = chunk_bounds(len(self), chunks, self.is_padding_enabled())
        return self._parts([range(*pair) for pair in pairwise(bounds)])

    def split(self, split_size: int) -> list[Self]:
        """Split into parts of `split_size` rows; the last part may be shorter."""
        if split_size < 1:
            raise LengthError(f"split: expected a size of at least 1, got {split_size}")
        bounds = [*range(0, len(self), split_size), len(self)]
        return self._parts([range(*pair) for pair in pairwise(bounds)])

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Concatenate batches along their rows. `meta_info` is merged: equal values are kept, under
        "metrics" dicts become one dict of lists, other differences raise `ConflictError`."""
        parts = list(data)
        joined = halves.concat([part.contents for part in parts])
        return parts[0].with_contents(*joined)

    def union(self, other: DataProto) -> Self:
        """Add the fields of `other` in place and return self.

        A key of both must have equal values; otherwise `ConflictError` names it and nothing is
        changed. Lengths must be equal, otherwise `LengthError`.
        """
        joined = halves.union_contents(self.contents, other.contents)
        self.batch, self.non_tensor_batch, self.meta_info = joined
        return self

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """Return a batch of these keys only; None means all of that kind.

        Values are shared unless `deepcopy`. Raises `FieldError` for a missing key.
        """
        tensors, arrays = self.contents.halves()
        tensors = halves.pick(tensors, batch_keys, "batch")
        picked = self.with_contents(
            halves.make_batch(self.batch, tensors, len(self)),
            halves.make_arrays(halves.pick(arrays, non_tensor_batch_keys, "non_tensor_batch")),
            halves.pick(self.meta_info, meta_info_keys, "meta_info"),
        )
        return copy.deepcopy(picked) if deepcopy else picked

    def pop(
        self,
        batch_keys: str | Sequence[str] | None = None,
        non_tensor_batch_keys: str | Sequence[str] | None = None,
        meta_info_keys: str | Sequence[str] | None = None,
    ) -> Self:
        """Remove these keys, or one key, of each kind and return them. Raises `FieldError`."""
        given = (batch_keys, non_tensor_batch_keys, meta_info_keys)
        tensors, arrays, meta = ([k] if isinstance(k, str) else list(k or ()) for k in given)
        popped = self.select(tensors, arrays, meta)
        if not tensors:
            popped.batch = None
        parts: tuple[Any, ...] = tuple(self.contents)  # one that is None has no keys
        for part, keys in zip(parts, (tensors, arrays, meta), strict=True):
            for key in keys:
                del part[key]
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Rename tensors in place and return self. Raises `FieldError` for a missing key."""
        renamed = halves.renamed(halves.tensor_columns(self.batch), old_keys, new_keys)
        self.batch = halves.make_batch(self.batch, renamed, len(self))
        return self

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Turn every row into `n_split` rows.

        Keys in `split_keys` are split along dimension 1 ([N, M, ...] to [N * n_split, M / n_split,
        ...]; a jagged field row by row), all others are repeated. Raises `FieldError` and
        `LengthError` naming the key.
        """
        if n_split < 1:
            raise LengthError(f"expected at least 1 part to split columns into, got {n_split}")
        split_keys = split_keys or []
        self.prefetch(split_keys)
        again = np.repeat(np.arange(len(self), dtype=np.int64), n_split)
        found: list[dict[str, Column]] = []
        for half in self.contents.halves():
            split = {key: half[key] for key in half if key in split_keys}
            ((others,),) = columns.take([{k: half[k] for k in half if k not in split}], [again])
            for key, column in split.items():
                others[key] = _split_value(key, local_value(column), n_split)
            found.append({key: others[key] for key in half})
        batch = halves.make_batch(self.batch, found[0], len(again))
        return self.with_contents(batch, halves.make_arrays(found[1]))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Iterate over mini-batches of `mini_batch_size` rows, `epochs` times.

        `dataloader_kwargs` are those of `torch.utils.data.DataLoader`; `seed` makes `shuffle=True`
        repeatable. Raises `LengthError` unless the length divides.
        """
        length, size = len(self), mini_batch_size
        if size < 1 or length % size:
            whole, rest = divmod(length, max(size, 1))
            text = f"{length} rows do not divide into mini-batches of {size}"
            raise LengthError(f"{text}: {length} = {size} × {whole} + {rest}")
        if length == 0:
            return iter(())  # a DataLoader that shuffles refuses an empty range
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        loader: DataLoader[list[int]] = DataLoader(
            cast(Any, range(length)),  # a range has the two methods that a DataLoader calls
            batch_size=size,
            collate_fn=list,
            generator=generator,
            **(dataloader_kwargs or {}),
        )
        return (self.select_idxs(rows) for _ in range(epochs) for rows in loader)

    def is_padding_enabled(self) -> bool:
        """Return True if this batch, or the process, allows calls to pad it."""
        own = any(self.meta_info.get(key) for key in DataProtoConfig.auto_padding_keys)
        return own or DataProtoConfig.auto_padding

    def padding(self, padding_size: int, padding_candidate: str = "last") -> None:
        """Append copies of the "first" or "last" row in place. `LengthError` for an empty batch."""
        length = len(self)
        if padding_size < 0:
            raise LengthError(f"padding: expected 0 or more rows to add, got {padding_size}")
        if padding_size and length == 0:
            raise LengthError(f"padding: an empty batch has no row to repeat {padding_size} times")
        added = np.full(padding_size, 0 if padding_candidate == "first" else length - 1)
        self._take_in_place(np.append(np.arange(length), added).astype(np.int64))

    def to(self, device: torch.device | str) -> Self:
        """Move all tensors to a device, fetching those that are remote, and return self."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def prefetch(self, keys: Sequence[str] | None = None) -> Self:
        """Fetch these fields (all if None) at once, so that later reads do not wait."""
        halves.prefetch(self.batch, self.non_tensor_batch, keys)
        return self

    def save_to_disk(self, filepath: str | Path) -> None:
        """Write one file (format: `protocol.disk`). Raises `FieldError` for what it cannot hold."""
        disk.save(self.contents, filepath)

    @staticmethod
    def load_from_disk(filepath: str | Path) -> DataProto:
        """Read a file of `save_to_disk`; run no code of it. Raises `DataError` if it is damaged."""
        return DataProto(*disk.load(filepath))

    def describe(self) -> str:
        """Return a table of the fields: shape, dtype, bytes, where stored, writer; fetches none."""
        return halves.table(self._contents)

    get_data_info = describe

    def print_size(self, prefix: str = "") -> None:
        """Print the size of tensors and of arrays in GB (2**30 bytes)."""
        parts = self.contents.halves()
        tensors, arrays = (sum(map(halves.nbytes, part.values())) / 2**30 for part in parts)
        start = f"{prefix}, " if prefix else ""
        print(f"{start}tensors {tensors:.6f} GB, non-tensors {arrays:.6f} GB")

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        tensors, arrays = map(halves.private, self.contents.halves())
        copied = self.with_contents(
            halves.make_batch(self.batch, tensors, len(self)),
            halves.make_arrays(arrays),
            copy.deepcopy(self.meta_info, memo),
        )
        vars(copied).update(copy.deepcopy(class_and_attributes(self)[1], memo))
        return copied

    def __reduce__(self) -> tuple[object, ...]:
        # Local fields are in the message; their buffers are pickled out of band.
        kind, attributes = class_and_attributes(self)
        return from_message, (message_of(self.contents, kind, attributes, columns.for_pickle),)

    def __copy__(self) -> Self:
        return self.select()


def from_message(message: Message) -> DataProto | TensorDict:
    """Return the batch of a message.

    Fields of a `DataProto` are fetched when they are read, those of a plain `TensorDict` at once.
    """
    contents, attributes = unpack(message)
    if message.kind is TensorDict:
        return DataProto(*contents).to_tensordict()
    kind = message.kind or DataProto
    assert issubclass(kind, DataProto), kind
    data = kind.__new__(kind)
    vars(data).update(attributes)
    data.batch, data.non_tensor_batch, data.meta_info = contents
    return data


def class_and_attributes(data: DataProto) -> tuple[type[DataProto] | None, MetaInfo]:
    """Return the class of a batch, None for `DataProto` itself, and what was set on it besides the
    three members, by a subclass or by a user."""
    attributes = {name: value for name, value in vars(data).items() if name not in _MEMBERS}
    return None if type(data) is DataProto else type(data), attributes


PADDING_FIELD = "__padding__"
"""Array of bool that marks the rows that a call has added. A call within it adds underscores."""


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Repeat rows from the front until the length divides. Return `(padded, pad_size)`.

    An empty batch is returned as it is: it has no row to repeat.
    """
    if size_divisor < 1:
        raise LengthError(f"expected a divisor of at least 1 to pad a batch to, got {size_divisor}")
    length = len(data)
    pad_size = -length % size_divisor
    if length == 0 or pad_size == 0:
        return data, 0
    # 3 rows to a multiple of 8: rows 0 1 2 0 1 2 0 1.
    rows = np.arange(length + pad_size, dtype=np.int64) % length
    return data.take_rows(rows), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Return the batch without its last `pad_size` rows."""
    if not 0 <= pad_size <= len(data):
        raise LengthError(f"cannot remove {pad_size} padding rows from a batch of {len(data)} rows")
    return data.take_rows(range(len(data) - pad_size)) if pad_size else data


def padding_marks(data: DataProto) -> dict[str, np.ndarray]:
    """Return the arrays of a batch that mark padding, by name. There are none if no call has added
    rows."""
    arrays = data.non_tensor_batch
    names = [name for name in arrays if name.startswith(PADDING_FIELD)]
    return {name: np.asarray(arrays[name], dtype=bool) for name in names}


def padding_rows(data: DataProto) -> Tensor:
    """Return [B] bool: whether a row is padding."""
    marked = np.zeros(len(data), dtype=bool)
    for values in padding_marks(data).values():
        marked |= values
    return torch.from_numpy(marked)


def collate_fn(items: Sequence[DataProtoItem]) -> DataProto:
    """Return the batch of single rows. Rows of different shapes become a jagged tensor.

    `meta_info` is that of the first row. Raises `LengthError` for an empty list.
    """
    if not items:
        raise LengthError("collate_fn: expected at least one row, got none")
    first = items[0]
    tensors: dict[str, Tensor] = {}
    if first.batch is not None:
        for key in map(str, first.batch.keys()):
            tensors[key] = _stack([item.batch[key] for item in items])
    arrays = {
        key: object_array([item.non_tensor_batch[key] for item in items])
        for key in first.non_tensor_batch
    }
    return DataProto.from_dict(tensors, arrays, dict(first.meta_info))


def _stack(rows: Sequence[Any]) -> Any:  # of tensors, TensorDicts or their objects
    first = rows[0]
    if isinstance(first, TensorDict):
        fields = {key: _stack([row.get(key) for row in rows]) for key in tensors_of(first)}
        return TensorDict(fields, [len(rows), *first.batch_size])
    if len({tuple(row.shape) for row in rows}) == 1:
        return torch.stack(list(rows))
    return torch.nested.nested_tensor(list(rows), layout=torch.jagged)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Reshape every field from [N, ...] to [new_batch_size, N / new_batch_size, ...].

    Raises `LengthError` unless N divides. Raises `FieldError` for jagged tensors: torch has no
    layout for rows of different lengths below two batch dimensions.
    """
    length = len(data)
    if _count("new_batch_size", new_batch_size) and length % new_batch_size:
        raise LengthError(f"{length} rows do not fold into {new_batch_size} equal rows")
    return _reshaped(data, 1, (new_batch_size, length // new_batch_size), new_batch_size)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Flatten the first `batch_dims` dimensions of every field to one: the inverse of folding.

    Raises `FieldError` for a field with fewer dimensions, or with others than the first field.
    """
    dims = _count("batch_dims", batch_dims)
    first = next(iter(_fields(data).values()), np.empty((0,) * dims))
    length = math.prod(first.shape[:dims])
    return _reshaped(data, dims, (length,), length)


def _holds_jagged(value: object) -> bool:
    entries = tensors_of(value).values() if isinstance(value, TensorDictBase) else ()
    return is_jagged(value) or any(map(_holds_jagged, entries))


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise LengthError(f"{name}: expected an integer of 1 or more, got {value!r}")
    return int(value)


def _fields(data: DataProto) -> dict[str, Any]:
    tensors = {} if data.batch is None else dict(data.batch.items())
    return {**tensors, **data.non_tensor_batch}


def _reshaped(data: DataProto, dims: int, to: tuple[int, ...], length: int) -> DataProto:
    """Return the batch with the first `dims` dimensions of every field reshaped."""
    fields = _fields(data)
    for key, value in fields.items():
        if _holds_jagged(value):
            raise FieldError(f"field '{key}' is jagged and cannot be folded", field=key)
        size, expected = list(value.shape[:dims]), list(next(iter(fields.values())).shape[:dims])
        if len(size) < dims or size != expected:
            raise FieldError(
                f"field '{key}' has shape {list(value.shape)}; expected {dims} batch dimensions, "
                f"{expected} as the first field",
                field=key,
            )
    batch = None
    if data.batch is not None:
        tensors = {k: v.reshape(*to, *v.shape[dims:]) for k, v in data.batch.items()}
        batch = TensorDict(tensors, batch_size=[length], device=data.batch.device)
    arrays = {k: a.reshape(*to, *a.shape[dims:]) for k, a in data.non_tensor_batch.items()}
    return data.with_contents(batch, arrays)


def check_dicts(
    tensors: Mapping[str, Tensors], non_tensors: Mapping[str, object], num_batch_dims: int
) -> tuple[TensorDict | None, ArrayHalf]:
    """Return the two halves of a batch from plain dicts. Types and lengths are checked."""
    if num_batch_dims < 1:
        raise LengthError(f"expected at least one batch dimension, got {num_batch_dims=}")
    if num_batch_dims > 1 and non_tensors:
        given = f"{num_batch_dims=} with non-tensors {list(non_tensors)}"
        raise LengthError(f"non-tensors have one batch dimension, got {given}")
    _check_mapping("tensors", tensors)
    _check_mapping("non_tensors", non_tensors)
    batch_size: tuple[int, ...] | None = None
    for key, value in tensors.items():
        if not isinstance(value, torch.Tensor | TensorDictBase):
            raise FieldError(
                f"field '{key}' in tensors is a {type(value).__name__}, not a tensor; "
                "lists and arrays go into non_tensors",
                field=key,
            )
        size = tuple(value.shape[:num_batch_dims])
        if len(size) < num_batch_dims:
            needs = f"it needs at least {num_batch_dims} batch dimension(s)"
            raise FieldError(f"field '{key}' has shape {list(value.shape)}; {needs}", field=key)
        if batch_size not in (None, size):
            first = next(iter(tensors))
            raise halves.unequal(f"'{first}'", list(batch_size or ()), key, list(size))
        batch_size = size
    batch = None if batch_size is None else TensorDict(dict(tensors), batch_size=list(batch_size))
    return batch, {key: as_array(key, value) for key, value in non_tensors.items()}


def _check_mapping(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise FieldError(f"{name}: expected a dict of fields by name, got {type(value).__name__}")
    for key in value:
        if not isinstance(key, str):
            raise FieldError(f"{name}: expected field names, got {key!r} ({type(key).__name__})")


def as_array(key: str, value: object) -> Array:
    """Return a numpy array as it is, a list or tuple as a one-dimensional object array."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, list | tuple):
        return object_array(value)
    hint = "it goes into tensors" if isinstance(value, torch.Tensor) else "wrap it in a list"
    text = f"field '{key}' in non_tensors is a {type(value).__name__}"
    raise FieldError(f"{text}, not a numpy array or a list; {hint}", field=key)


def _split_value(key: str, value: LocalValue, n_split: int) -> LocalValue:
    if isinstance(value, TensorDictBase) or (isinstance(value, torch.Tensor) and value.is_nested):
        raise FieldError(f"field '{key}' is {describe_value(value)} and has no columns", field=key)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype == object:
        rows = [_pieces(key, row, entries, n_split) for row, entries in enumerate(value)]
        return object_array([piece for pieces in rows for piece in pieces])
    if len(value.shape) < 2 or value.shape[1] % n_split:
        lacks = f"has no dimension 1 that divides into {n_split} columns"
        raise LengthError(f"field '{key}' with shape {list(value.shape)} {lacks}", field=key)
    return value.reshape(value.shape[0] * n_split, value.shape[1] // n_split, *value.shape[2:])


def _pieces(key: str, row: int, entries: Any, n_split: int) -> list[object]:
    """Return the columns of a row that is a list, tuple or array, as values of the same type."""
    known = isinstance(entries, list | tuple | np.ndarray) and np.ndim(entries) > 0
    if not known or len(entries) % n_split:
        raise LengthError(
            f"row {row} of field '{key}' is no list, tuple or array whose length divides into "
            f"{n_split} columns: {halves.show(entries)}",
            field=key,
        )
    size = len(entries) // n_split
    return [entries[i * size : (i + 1) * size] for i in range(n_split)]
