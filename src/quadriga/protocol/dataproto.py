"""`DataProto`: the one container that crosses process borders.

Row operations are two steps: the index becomes a `RowOp` (rowops.py), and the operation is applied
to each column. Columns that lie in another process only compose references (refbatch.py), so the
same code serves local data and data that never came here.

The files below this one work on a batch's `Contents`, and know no `DataProto`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from quadriga.errors import LengthError
from quadriga.protocol import message_content as wire
from quadriga.protocol.columns import contents as batches
from quadriga.protocol.config import DataProtoConfig
from quadriga.protocol.item import DataProtoItem
from quadriga.protocol.message import Message
from quadriga.protocol.ops import construct as building
from quadriga.protocol.ops import describe, disk
from quadriga.protocol.ops import join as joining
from quadriga.protocol.ops import mini_batches as iterating
from quadriga.protocol.ops import split_columns as cutting
from quadriga.protocol.values import row_selection as rowops
from quadriga.protocol.values.storage import Origin, Store


class DataProto:
    """A batch: tensors, object arrays of the same length, and settings that travel along.

    - `batch`: a `TensorDict` whose tensors share dimension 0 ([N, ...]), None when there are no
      tensors, or a `RemoteBatch` (same reading interface) while some tensors lie elsewhere.
    - `non_tensor_batch`: dict of numpy arrays [N, ...], object dtype unless given otherwise.
    - `meta_info`: a plain dict; not split, merged by `concat`.

    Raises `LengthError` or `FieldError` at construction when the parts do not fit together.
    """

    def __init__(
        self,
        batch: Any = None,
        non_tensor_batch: dict[str, np.ndarray[Any, Any]] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> None:
        self.batch = batch
        self.non_tensor_batch = {} if non_tensor_batch is None else non_tensor_batch
        self.meta_info = {} if meta_info is None else meta_info
        self.check_consistency()

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """A batch from a dict of tensors and a dict of arrays or lists.

        `auto_padding=True` marks the batch (in `meta_info`) as one that calls may pad.
        Raises `LengthError` naming both fields when lengths differ, `FieldError` for other types.
        """
        meta = dict(meta_info or {})
        if auto_padding:
            meta[DataProtoConfig.auto_padding_key] = True
        batch, arrays = building.check_dicts(tensors or {}, non_tensors or {}, num_batch_dims)
        return cls(batch, arrays, meta)

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, Any],
        meta_info: dict[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """A batch from one dict; tensors, and arrays or lists, are told apart by type."""
        tensors, arrays = building.sort_by_type(data)
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls,
        tensor_dict: TensorDictBase | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> Self:
        """A batch from a `TensorDict`: stacks of non-tensors become arrays, lone ones meta_info."""
        return cls(*building.split_tensordict(tensor_dict, meta_info, num_batch_dims))

    def to_tensordict(self) -> TensorDict:
        """The inverse of `from_tensordict`. Fetches every field."""
        return building.join_tensordict(self.contents)

    def check_consistency(self) -> None:
        """Raises `LengthError` or `FieldError` unless all fields have the same length and kind."""
        building.check(self.contents)

    @property
    def contents(self) -> batches.Contents:
        """The three parts, without the class around them."""
        return batches.Contents(self.batch, self.non_tensor_batch, self.meta_info)

    def __len__(self) -> int:
        return self.contents.rows

    def __repr__(self) -> str:
        tensors = [] if self.batch is None else list(self.batch.keys())
        return (
            f"{type(self).__name__}(rows={len(self)}, batch={tensors}, "
            f"non_tensor_batch={list(self.non_tensor_batch)}, meta_info={list(self.meta_info)})"
        )

    def __getitem__(self, index: Any) -> Any:
        """`data[int]` is a `DataProtoItem`; slices, lists, index and mask arrays a `DataProto`."""
        if rowops.is_row_number(index):
            row = rowops.row_number(index, len(self))
            return DataProtoItem(
                *batches.row(self.batch, self.non_tensor_batch, row), self.meta_info
            )
        return self.take_rows(rowops.from_index(index, len(self)))

    def __iter__(self) -> Iterator[DataProtoItem]:
        self.prefetch()
        for i in range(len(self)):
            yield self[i]

    def take_rows(self, op: rowops.RowOp) -> Self:
        """The rows of `op` (see rowops.py); bookkeeping only for fields that lie elsewhere."""
        batch, arrays = batches.take(self.batch, self.non_tensor_batch, op)
        return type(self)(batch, arrays, dict(self.meta_info))

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> Self:
        """Rows `start:end:step`. Local tensors are views where `step` is 1."""
        return self.take_rows(rowops.from_slice(slice(start, end, step), len(self)))

    def select_idxs(self, idxs: Any) -> Self:
        """The rows of a list, numpy array or tensor of indices, or of a bool mask."""
        return self.take_rows(rowops.from_index(idxs, len(self)))

    def reorder(self, indices: Any) -> None:
        """Puts the rows in the order of `indices` (length N or any other), in place."""
        op = rowops.from_index(indices, len(self))
        self.batch, self.non_tensor_batch = batches.take(self.batch, self.non_tensor_batch, op)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Each row `repeat_times` times: aabb when interleaved, abab when not."""
        rows = np.arange(len(self), dtype=np.int64)
        rows = np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times)
        return self.take_rows(rowops.Take(rows))

    def sample_level_repeat(self, repeat_times: Any) -> Self:
        """Row `i` `repeat_times[i]` times. Raises `LengthError` unless every row has a number."""
        return self.take_rows(rowops.repeats(repeat_times, len(self)))

    def chunk(self, chunks: int) -> list[Self]:
        """`chunks` parts in order, of equal length.

        With padding enabled lengths may differ by one, longer parts first. Otherwise a length
        that does not divide raises `LengthError`.
        """
        bounds = rowops.chunk_bounds(len(self), chunks, self.is_padding_enabled())
        return [self.take_rows(rowops.Span(a, b)) for a, b in itertools.pairwise(bounds)]

    def split(self, split_size: int) -> list[Self]:
        """Parts of `split_size` rows; the last may be shorter."""
        if split_size < 1:
            raise LengthError(f"split needs a size of at least 1; got {split_size}")
        return [self.slice(i, i + split_size) for i in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Rows of all parts in order. `meta_info` is merged: see `joining.merge_meta`."""
        parts = list(data)
        joined = joining.concat([part.contents for part in parts])
        return type(parts[0])(*joined)

    def union(self, other: DataProto) -> Self:
        """Adds the fields of `other` in place and returns self.

        A key that both have must hold equal values, else `ConflictError` names it and nothing
        has changed. Lengths must agree, else `LengthError`.
        """
        joined = joining.union(self.contents, other.contents)
        self.batch, self.non_tensor_batch, self.meta_info = joined
        return self

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """A batch of these keys only; None means all of that kind. Values are shared, not copied,
        unless `deepcopy`. Raises `FieldError` for a key that is not there."""
        picked = type(self)(
            batches.select(self.batch, batch_keys),
            batches.select_arrays(self.non_tensor_batch, non_tensor_batch_keys),
            batches.pick(self.meta_info, meta_info_keys, "meta_info"),
        )
        return copy.deepcopy(picked) if deepcopy else picked

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> Self:
        """Removes these keys and returns them as a batch; None means none of that kind."""
        popped = self.select(
            batch_keys or [], non_tensor_batch_keys or [], meta_info_keys or [], deepcopy=False
        )
        if not batch_keys:
            popped.batch = None
        for key in batch_keys or []:
            del self.batch[key]
        for key in non_tensor_batch_keys or []:
            del self.non_tensor_batch[key]
        for key in meta_info_keys or []:
            del self.meta_info[key]
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Renames tensors in place and returns self."""
        self.batch = batches.rename(self.batch, old_keys, new_keys)
        return self

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Each row becomes `n_split` rows: keys in `split_keys` are cut along dimension 1
        ([N, M, ...] to [N * n_split, M / n_split, ...]; of a jagged one, each row by itself), all
        others are repeated. Raises `FieldError` and `LengthError` naming the key."""
        cut = cutting.unfold_column_chunks(self.contents, n_split, split_keys or [])
        return type(self)(*cut)

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Mini-batches of `mini_batch_size` rows, `epochs` times over. `dataloader_kwargs` go to
        `torch.utils.data.DataLoader`; `seed` makes `shuffle=True` repeatable.
        Raises `LengthError` unless the length divides."""
        chosen = iterating.mini_batch_rows(
            len(self), mini_batch_size, epochs, seed, dataloader_kwargs or {}
        )
        return (self.select_idxs(rows) for rows in chosen)

    def is_padding_enabled(self) -> bool:
        """True when this batch, or the process, allows calls to pad it."""
        own = bool(self.meta_info.get(DataProtoConfig.auto_padding_key, False))
        return own or DataProtoConfig.auto_padding

    def padding(self, padding_size: int, padding_candidate: str = "last") -> None:
        """Appends `padding_size` copies of the "first" or "last" row, in place. Raises
        `LengthError` for an empty batch, which has no row to copy."""
        op = rowops.padding(len(self), padding_size, padding_candidate)
        self.batch, self.non_tensor_batch = batches.take(self.batch, self.non_tensor_batch, op)

    def to(self, device: torch.device | str) -> Self:
        """Moves all tensors (fetching those that lie elsewhere) and returns self."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def prefetch(self, keys: Sequence[str] | None = None) -> Self:
        """Fetches these fields at once (all when None), so that later reads do not wait."""
        batches.prefetch(self.batch, self.non_tensor_batch, keys)
        return self

    def save_to_disk(self, filepath: str | Path) -> None:
        """Writes the batch to one file (see disk.py for the format)."""
        disk.save(self.contents, filepath)

    @staticmethod
    def load_from_disk(filepath: str | Path) -> DataProto:
        """Reads what `save_to_disk` wrote; runs no code from the file."""
        return DataProto(*disk.load(filepath))

    def describe(self) -> str:
        """A table of fields: shape, dtype, bytes, where they lie, who wrote them."""
        return describe.table(self.contents)

    def get_data_info(self) -> str:
        """One line a field with shape and dtype, and the types inside `meta_info`."""
        return describe.data_info(self.contents)

    def print_size(self, prefix: str = "") -> None:
        """Prints the size of tensors and of arrays in GB (2**30 bytes)."""
        print(describe.size_line(self.contents, prefix))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        batch, arrays = batches.deepcopy(self.batch, self.non_tensor_batch)
        return type(self)(batch, arrays, copy.deepcopy(self.meta_info, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return from_message, (wire.carry(self.contents, _kind(self)),)

    def __copy__(self) -> Self:
        return self.select()


def to_message(data: DataProto, origin: Origin, store: Store) -> Message:
    """The batch as it crosses a process border, written by `origin`; large fields in `store`."""
    return wire.pack(data.contents, _kind(data), origin, store)


def tensordict_message(tensors: TensorDictBase, origin: Origin, store: Store) -> Message:
    """A plain `TensorDict` as it crosses: the message of the batch that it is."""
    contents = DataProto.from_tensordict(tensors).contents
    return wire.pack(contents, TensorDict, origin, store)


def from_message(message: Message) -> Any:
    """What a message was made of: a `DataProto`, its fields fetched when they are read, or a plain
    `TensorDict` with all of its fields here."""
    if message.kind is TensorDict:
        return DataProto(*wire.unpack(message)).to_tensordict()
    return (message.kind or DataProto)(*wire.unpack(message))


def _kind(data: DataProto) -> type[DataProto] | None:
    return None if type(data) is DataProto else type(data)
