"""Indexes: which rows a slice, a list, an array, a tensor or a mask selects."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quadriga.errors import FieldError, LengthError, ProtocolError
from quadriga.protocol.storage import Array, Ints, RowSelection

RowIndex = slice | Sequence[int] | Sequence[bool] | Array | torch.Tensor
"""An index that selects several rows."""


def from_slice(index: slice, length: int) -> RowSelection:
    """Return the rows of a Python slice over `length` rows."""
    start, stop, step = index.indices(length)
    if step == 1:
        return range(start, max(start, stop))
    return np.arange(start, stop, step, dtype=np.int64)


def from_index(index: object, length: int) -> RowSelection:
    """Return the rows of a list, tuple, range, array or tensor of row numbers, or of a bool mask.

    Negative numbers count from the end. Raises `IndexError` for a row that does not exist and
    `ProtocolError` for a mask of the wrong length or an index that is not one-dimensional.
    """
    if isinstance(index, slice):
        return from_slice(index, length)
    given = _as_array(index)
    if given.ndim != 1:
        raise ProtocolError(f"expected a one-dimensional row index, got shape {list(given.shape)}")
    if given.dtype == np.bool_:
        if len(given) != length:
            raise ProtocolError(f"expected a mask of {length} rows, got {len(given)} entries")
        return np.flatnonzero(given).astype(np.int64)
    if given.dtype.kind not in "iu":
        raise ProtocolError(f"expected row numbers or a bool mask, got dtype {given.dtype}")
    rows = given.astype(np.int64, copy=True)
    if rows.size:
        low, high = int(rows.min()), int(rows.max())
        if low < -length or high >= length:
            bad = low if low < -length else high
            raise IndexError(f"row {bad} of a batch of {length} rows")
        rows[rows < 0] += length
    return rows


def _as_array(index: object) -> Array:
    if isinstance(index, torch.Tensor):
        return np.asarray(index.detach().cpu())
    if isinstance(index, np.ndarray):
        return index
    if isinstance(index, Sequence) and not isinstance(index, str | bytes):
        items = [i.item() if isinstance(i, torch.Tensor) else i for i in index]
        return np.asarray(items, dtype=None if items else np.int64)
    raise ProtocolError(
        "expected an int, a slice, a list, a numpy array or a tensor as row index, "
        f"got {type(index).__name__}"
    )


def repeated(repeat_times: object, length: int) -> Ints:
    """Return row `i` `repeat_times[i]` times.

    Raises `FieldError` unless `repeat_times` holds integers, `LengthError` unless it holds one for
    each row and none is negative.
    """
    if isinstance(repeat_times, torch.Tensor):
        repeat_times = repeat_times.detach().cpu().numpy()
    counts = np.asarray(list(repeat_times) if isinstance(repeat_times, Sequence) else repeat_times)
    if counts.ndim != 1 or (counts.size and counts.dtype.kind not in "iu"):
        raise FieldError(f"repeat_times: expected one integer per row, got {repeat_times!r}")
    if len(counts) != length or (counts < 0).any():
        raise LengthError(
            f"repeat_times: expected {length} counts of 0 or more, one for each row, got {counts}"
        )
    counts = counts.astype(np.int64)
    return np.repeat(np.arange(length, dtype=np.int64), counts)


def padded(length: int, size: int, candidate: str) -> Ints:
    """Return all rows, then `size` times the first row ("first") or the last row (otherwise)."""
    if size < 0:
        raise LengthError(f"padding: expected 0 or more rows to add, got {size}")
    if size and length == 0:
        raise LengthError(f"padding: an empty batch has no row to repeat {size} times")
    row = 0 if candidate == "first" else length - 1
    added = np.full(size, row, dtype=np.int64)
    return np.append(np.arange(length, dtype=np.int64), added)


def row_number(index: object, length: int) -> int | None:
    """Return the row of an int, a numpy integer, or an integer tensor or array without dimensions.

    Negative numbers count from the end. Return None for any other index. Raises `IndexError` for a
    row that does not exist.
    """
    if isinstance(index, torch.Tensor | np.ndarray):
        if index.ndim or index.dtype in (torch.bool, np.bool_):
            return None
        index = index.item()
    if isinstance(index, bool | np.bool_) or not isinstance(index, int | np.integer):
        return None
    row = int(index)
    if not -length <= row < length:
        raise IndexError(f"row {row} of a batch of {length} rows")
    return row + length if row < 0 else row
