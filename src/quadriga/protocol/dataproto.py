"""`DataProto`: the container of everything that is sent between controller and workers.

An operation on rows has two steps: the index becomes a `RowSelection` (values/row_index.py), and
the selection is applied to every column (columns/). Remote columns only change where their rows
are found, so the same code handles local and remote fields.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from quadriga.errors import LengthError
from quadriga.protocol.columns import contents as halves
from quadriga.protocol.columns.contents import (
    ArrayHalf,
    Contents,
    DataProtoItem,
    MetaInfo,
    TensorHalf,
)
from quadriga.protocol.columns.remote_batch import RemoteBatch
from quadriga.protocol.config import DataProtoConfig
from quadriga.protocol.message import Message, pack_for_pickle, unpack
from quadriga.protocol.ops import construct, describe, disk, join
from quadriga.protocol.ops.split import LoaderSettings, mini_batch_rows, unfold_column_chunks
from quadriga.protocol.values import row_index
from quadriga.protocol.values.row_index import RowIndex
from quadriga.protocol.values.rows import RowIndices, RowSelection, chunk_bounds

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
            batch = construct.check_dicts(batch, {}, 1)[0]
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
        batch, arrays = construct.check_dicts(tensors or {}, non_tensors or {}, num_batch_dims)
        return cls(batch, arrays, meta)

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, object],
        meta_info: MetaInfo | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """Return a batch of one dict; tensors, and arrays or lists, are separated by type."""
        tensors, arrays = construct.sort_by_type(data)
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
        return cls(*construct.split_tensordict(tensor_dict, meta_info, num_batch_dims))

    def to_tensordict(self) -> TensorDict:
        """Return the inverse of `from_tensordict`. Fetches every field."""
        return construct.join_tensordict(self.contents)

    def check_consistency(self) -> None:
        """Raise `LengthError` or `FieldError` unless all fields have one length and known types."""
        halves.check(self.contents)

    @property
    def contents(self) -> Contents:
        """The three parts without the class around them."""
        return Contents(self.batch, self.non_tensor_batch, self.meta_info)

    def with_contents(
        self, batch: TensorHalf, arrays: ArrayHalf, meta: MetaInfo | None = None
    ) -> Self:
        """Return a batch like this one with these halves; `meta_info` is copied if None."""
        meta = dict(self.meta_info) if meta is None else meta
        if type(self) is DataProto and len(vars(self)) == len(_MEMBERS):  # the usual, fast case
            return type(self)(batch, arrays, meta)
        return _build(type(self), Contents(batch, arrays, meta), class_and_attributes(self)[1])

    def __len__(self) -> int:
        return self.contents.rows

    def __repr__(self) -> str:
        tensors = [] if self.batch is None else list(self.batch.keys())
        return (
            f"{type(self).__name__}(rows={len(self)}, batch={tensors}, "
            f"non_tensor_batch={list(self.non_tensor_batch)}, meta_info={list(self.meta_info)})"
        )

    def __getitem__(self, index: Any) -> Any:
        """Return a `DataProtoItem` for `data[int]`, a batch for slices, lists, arrays and masks."""
        row = row_index.row_number(index, len(self))
        if row is None:
            return self.take_rows(row_index.from_index(index, len(self)))
        return DataProtoItem(*halves.row(self.batch, self.non_tensor_batch, row), self.meta_info)

    def __iter__(self) -> Iterator[DataProtoItem]:
        self.prefetch()
        for i in range(len(self)):
            yield self[i]

    def take_rows(self, selection: RowSelection) -> Self:
        """Return the selected rows. Fetches nothing."""
        return self.with_contents(*halves.take(self.batch, self.non_tensor_batch, selection))

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> Self:
        """Return rows `start:end:step`. Local tensors are views if `step` is 1."""
        return self.take_rows(row_index.from_slice(slice(start, end, step), len(self)))

    def select_idxs(self, idxs: RowIndex) -> Self:
        """Return the rows of a list, numpy array or tensor of row numbers, or of a bool mask."""
        return self.take_rows(row_index.from_index(idxs, len(self)))

    def reorder(self, indices: RowIndex) -> None:
        """Replace the rows by those of `indices` (length N or any other), in place."""
        self._take_in_place(row_index.from_index(indices, len(self)))

    def _take_in_place(self, selection: RowSelection) -> None:
        taken = halves.take(self.batch, self.non_tensor_batch, selection)
        self.batch, self.non_tensor_batch = taken

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Repeat every row `repeat_times` times: aabb if interleaved, abab if not."""
        chosen = np.arange(len(self), dtype=np.int64)
        chosen = np.repeat(chosen, repeat_times) if interleave else np.tile(chosen, repeat_times)
        return self.take_rows(RowIndices(chosen))

    def sample_level_repeat(self, repeat_times: Sequence[int] | torch.Tensor | np.ndarray) -> Self:
        """Repeat row `i` `repeat_times[i]` times. Raises `LengthError` unless every row has one."""
        return self.take_rows(row_index.repeated(repeat_times, len(self)))

    def chunk(self, chunks: int) -> list[Self]:
        """Split into `chunks` parts of equal length, in order.

        With padding enabled lengths may differ by one, longer parts first. Otherwise a length
        that does not divide raises `LengthError`.
        """
        bounds = chunk_bounds(len(self), chunks, self.is_padding_enabled())
        parts = halves.chunk(self.batch, self.non_tensor_batch, bounds)
        return [self.with_contents(*part) for part in parts]

    def split(self, split_size: int) -> list[Self]:
        """Split into parts of `split_size` rows; the last part may be shorter."""
        if split_size < 1:
            raise LengthError(f"split: expected a size of at least 1, got {split_size}")
        return [self.slice(i, i + split_size) for i in range(0, len(self), split_size)]

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
        joined = join.union(self.contents, other.contents)
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
        picked = self.with_contents(
            halves.select(self.batch, batch_keys),
            halves.select_arrays(self.non_tensor_batch, non_tensor_batch_keys),
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
        self.batch = halves.rename(self.batch, old_keys, new_keys)
        return self

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Turn every row into `n_split` rows.

        Keys in `split_keys` are split along dimension 1 ([N, M, ...] to [N * n_split, M / n_split,
        ...]; a jagged field row by row), all others are repeated. Raises `FieldError` and
        `LengthError` naming the key.
        """
        unfolded = unfold_column_chunks(self.contents, n_split, split_keys or [])
        return self.with_contents(*unfolded)

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: LoaderSettings | None = None,
    ) -> Iterator[Self]:
        """Iterate over mini-batches of `mini_batch_size` rows, `epochs` times.

        `dataloader_kwargs` are those of `torch.utils.data.DataLoader`; `seed` makes `shuffle=True`
        repeatable. Raises `LengthError` unless the length divides.
        """
        chosen = mini_batch_rows(len(self), mini_batch_size, epochs, seed, dataloader_kwargs or {})
        return (self.select_idxs(rows) for rows in chosen)

    def is_padding_enabled(self) -> bool:
        """Return True if this batch, or the process, allows calls to pad it."""
        own = any(self.meta_info.get(key) for key in DataProtoConfig.auto_padding_keys)
        return own or DataProtoConfig.auto_padding

    def padding(self, padding_size: int, padding_candidate: str = "last") -> None:
        """Append copies of the "first" or "last" row in place. `LengthError` for an empty batch."""
        self._take_in_place(row_index.padded(len(self), padding_size, padding_candidate))

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
        """Write one file (format: ops/disk.py). Raises `FieldError` for what it cannot hold."""
        disk.save(self.contents, filepath)

    @staticmethod
    def load_from_disk(filepath: str | Path) -> DataProto:
        """Read a file of `save_to_disk`; run no code of it. Raises `DataError` if it is damaged."""
        return DataProto(*disk.load(filepath))

    def describe(self) -> str:
        """Return a table of the fields: shape, dtype, bytes, where stored, writer; fetches none."""
        return describe.table(self.contents)

    def get_data_info(self) -> str:
        """Return one line per field with shape and dtype, and the types in `meta_info`."""
        return describe.data_info(self.contents)

    def print_size(self, prefix: str = "") -> None:
        """Print the size of tensors and of arrays in GB (2**30 bytes)."""
        print(describe.size_line(self.contents, prefix))

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        batch, arrays = halves.deepcopy(self.batch, self.non_tensor_batch)
        copied = self.with_contents(batch, arrays, copy.deepcopy(self.meta_info, memo))
        vars(copied).update(copy.deepcopy(class_and_attributes(self)[1], memo))
        return copied

    def __reduce__(self) -> tuple[object, ...]:
        return from_message, (pack_for_pickle(self.contents, *class_and_attributes(self)),)

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
    return _build(kind, contents, attributes)


def class_and_attributes(data: DataProto) -> tuple[type[DataProto] | None, MetaInfo]:
    """Return the class of a batch, None for `DataProto` itself, and what was set on it besides the
    three members, by a subclass or by a user."""
    attributes = {name: value for name, value in vars(data).items() if name not in _MEMBERS}
    return None if type(data) is DataProto else type(data), attributes


D = TypeVar("D", bound=DataProto)


def _build(kind: type[D], contents: Contents, attributes: Mapping[str, object]) -> D:
    """Return a batch without a call of its own `__init__`, whose arguments are those of a user."""
    data = kind.__new__(kind)
    vars(data).update(attributes)
    DataProto.__init__(data, *contents)
    return data
