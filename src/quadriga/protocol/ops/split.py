"""Splitting a batch: columns into more rows, rows into mini-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch.utils.data import DataLoader

from quadriga.errors import FieldError, LengthError
from quadriga.protocol.columns import column as columns
from quadriga.protocol.columns import contents as halves
from quadriga.protocol.columns.column import Column, Columns, local_value
from quadriga.protocol.columns.contents import Contents
from quadriga.protocol.values import jagged
from quadriga.protocol.values.field_spec import LocalValue
from quadriga.protocol.values.rows import RowIndices

LoaderSettings: TypeAlias = Mapping[str, Any]
"""Keyword arguments of `torch.utils.data.DataLoader`."""


def unfold_column_chunks(contents: Contents, n_split: int, split_keys: Sequence[str]) -> Contents:
    """Turn every row into `n_split` rows.

    Fields in `split_keys` are fetched and split along dimension 1, rows of all others are repeated;
    remote ones stay remote. Raises `FieldError` for an unknown key, `LengthError` where dimension 1
    does not divide.
    """
    if n_split < 1:
        raise LengthError(f"expected at least 1 part to split columns into, got {n_split}")
    batch, arrays, meta = contents
    tensors, objects = halves.tensor_columns(batch), halves.array_columns(arrays)
    known = [*tensors, *objects]
    for key in split_keys:
        if key not in known:
            raise halves.missing(key, known, "the batch")
    halves.prefetch(batch, arrays, split_keys)
    selection = RowIndices(np.repeat(np.arange(contents.rows, dtype=np.int64), n_split))
    cache = columns.TakeCache()

    def unfold(half: Columns) -> dict[str, Column]:
        others = {key: column for key, column in half.items() if key not in split_keys}
        taken = columns.take(others, selection, cache)
        return {
            key: taken[key] if key in taken else _split(key, local_value(column), n_split)
            for key, column in half.items()
        }

    new_batch = None
    if batch is not None:
        new_batch = halves.make_batch(batch, unfold(tensors), len(selection))
    return Contents(new_batch, halves.make_arrays(unfold(objects)), dict(meta))


def _split(key: str, value: LocalValue, n_split: int) -> LocalValue:
    if isinstance(value, torch.Tensor) and value.is_nested:
        return _split_jagged(key, value, n_split)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype == object:
        return _split_objects(key, value, n_split)
    if isinstance(value, TensorDictBase):
        raise FieldError(f"field '{key}' is a nested TensorDict and has no columns", field=key)
    if len(value.shape) < 2 or value.shape[1] % n_split:
        raise LengthError(
            f"field '{key}' with shape {list(value.shape)} has no dimension 1 that divides into "
            f"{n_split} columns",
            field=key,
        )
    return value.reshape(value.shape[0] * n_split, value.shape[1] // n_split, *value.shape[2:])


def _split_objects(key: str, value: NDArray[Any], n_split: int) -> NDArray[Any]:
    """Split every row, a list, tuple or array, into `n_split` rows of the same type."""
    pieces: list[object] = []
    for row, entries in enumerate(value):
        if not isinstance(entries, list | tuple | np.ndarray) or np.ndim(entries) == 0:
            raise LengthError(
                f"row {row} of field '{key}' is a {type(entries).__name__} and has no columns; "
                "only rows that are lists, tuples or arrays can be split",
                field=key,
            )
        if len(entries) % n_split:
            raise LengthError(
                f"row {row} of field '{key}' has {len(entries)} columns, which do not divide into "
                f"{n_split}",
                field=key,
            )
        size = len(entries) // n_split
        pieces += [entries[i * size : (i + 1) * size] for i in range(n_split)]
    # `np.array(pieces)` would make columns of entries of equal length.
    result = np.empty(len(pieces), dtype=object)
    result[:] = pieces
    return result


def _split_jagged(key: str, value: torch.Tensor, n_split: int) -> torch.Tensor:
    """Split every row into `n_split` rows: the same values with more offsets."""
    if jagged.ragged_dim(value) > 1:
        raise FieldError(
            f"field '{key}' is ragged in dimension {jagged.ragged_dim(value)}; only columns of "
            "fields that are dense or ragged in dimension 1 can be split",
            field=key,
        )
    # Rows of 2, 0 and 4 numbers have offsets 0 2 2 6; split in two they have 0 1 2 2 2 4 6.
    values, offsets = jagged.parts(value)
    lengths = offsets.diff()
    odd = torch.nonzero(lengths % n_split).flatten().tolist()
    if odd:
        raise LengthError(
            f"row {odd[0]} of jagged field '{key}' has {int(lengths[odd[0]])} columns, which do "
            f"not divide into {n_split}",
            field=key,
        )
    # lengths 2 0 4, n_split 2: starts [[0, 0 + 1], [2, 2 + 0], [2, 2 + 2]] → 0 1 2 2 2 4, then 6.
    steps = torch.arange(n_split, device=offsets.device)
    starts = offsets[:-1, None] + (lengths // n_split)[:, None] * steps
    return jagged.build(values, torch.cat([starts.flatten(), offsets[-1:]]).to(offsets.dtype))


def mini_batch_rows(
    length: int, size: int, epochs: int, seed: int | None, loader_kwargs: LoaderSettings
) -> Iterator[list[int]]:
    """Yield `length // size * epochs` lists of row numbers.

    Raises `LengthError` at the call, not at the first iteration, unless `size` divides `length`.
    """
    if size < 1 or length % size:
        raise LengthError(
            f"{length} rows do not divide into mini-batches of {size}: "
            f"{length} = {size} × {length // max(size, 1)} + {length % max(size, 1)}"
        )
    return _draw(length, size, epochs, seed, loader_kwargs)


def _draw(
    length: int, size: int, epochs: int, seed: int | None, loader_kwargs: LoaderSettings
) -> Iterator[list[int]]:
    if length == 0:
        return
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    loader: DataLoader[list[int]] = DataLoader(
        cast(Any, range(length)),  # a range has the two methods that a DataLoader calls
        batch_size=size,
        collate_fn=list,
        generator=generator,
        **loader_kwargs,
    )
    for _ in range(epochs):
        yield from loader
