"""Which rows: an index, a slice or a mask, turned into one of two plain records.

Every operation that changes rows (slice, chunk, split, reorder, repeat, padding …) is either a
`Span` (a run of rows, in order) or a `Take` (any rows, any order, repeats allowed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quadriga.errors import FieldError, LengthError, ProtocolError


@dataclass(frozen=True, slots=True)
class Span:
    """Rows `start … stop-1`. A local tensor gives a view."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Take:
    """Rows `rows[0], rows[1], …` ([M] int64, each within the batch). Local tensors are copied."""

    rows: np.ndarray[Any, np.dtype[np.int64]]

    def __len__(self) -> int:
        return len(self.rows)


RowOp = Span | Take


def from_slice(index: slice, length: int) -> RowOp:
    """A Python slice over `length` rows; steps other than 1 become a `Take`."""
    start, stop, step = index.indices(length)
    if step == 1:
        return Span(start, max(start, stop))
    return Take(np.arange(start, stop, step, dtype=np.int64))


def from_index(index: Any, length: int) -> RowOp:
    """A list, tuple, range, numpy array or tensor of row numbers or a bool mask, as a `RowOp`.

    Negative numbers count from the end. Raises IndexError for a row that does not exist and
    `ProtocolError` for a mask of the wrong length or an index that is not one-dimensional.
    """
    if isinstance(index, slice):
        return from_slice(index, length)
    rows = _as_array(index)
    if rows.ndim != 1:
        raise ProtocolError(
            f"rows are chosen with a one-dimensional index; got shape {tuple(rows.shape)}"
        )
    if rows.dtype == np.bool_:
        return _from_mask(rows, length)
    if rows.dtype.kind not in "iu":
        raise ProtocolError(f"rows are chosen with integers or a bool mask; got {rows.dtype}")
    rows = rows.astype(np.int64, copy=True)
    if rows.size:
        _check_range(rows, length)
        rows[rows < 0] += length
    return Take(rows)


def repeats(repeat_times: Any, length: int) -> Take:
    """Row `i` `repeat_times[i]` times, as a `RowOp`."""
    if isinstance(repeat_times, torch.Tensor):
        repeat_times = repeat_times.detach().cpu().numpy()
    counts = np.asarray(
        repeat_times if not isinstance(repeat_times, Sequence) else list(repeat_times)
    )
    if counts.size == 0:
        counts = counts.astype(np.int64)
    if counts.ndim != 1 or counts.dtype.kind not in "iu":
        raise FieldError(
            f"repeat_times is a list of whole numbers, one a row; got {repeat_times!r}"
        )
    if len(counts) != length:
        raise LengthError(
            f"repeat_times has one number a row: the batch has {length} rows, got {len(counts)}"
        )
    if counts.size and int(counts.min()) < 0:
        raise LengthError(f"a row is repeated 0 or more times; got {int(counts.min())}")
    return Take(np.repeat(np.arange(length, dtype=np.int64), counts))


def padding(length: int, size: int, candidate: str) -> Take:
    """All rows, then `size` times the first or the last (anything but "first" means last)."""
    if size < 0:
        raise LengthError(f"padding adds 0 or more rows; got {size}")
    if size and length == 0:
        raise LengthError(f"an empty batch has no row to repeat {size} times")
    row = 0 if candidate == "first" else length - 1
    return Take(np.append(np.arange(length, dtype=np.int64), np.full(size, row, dtype=np.int64)))


def chunk_bounds(length: int, chunks: int, uneven: bool) -> list[int]:
    """`chunks + 1` row numbers at which a batch is cut. Raises `LengthError` when it must divide
    and does not."""
    if chunks < 1:
        raise LengthError(f"a batch is cut into at least 1 part; got {chunks}")
    size, rest = divmod(length, chunks)
    if rest and not uneven:
        raise LengthError(
            f"{length} rows do not divide into {chunks} equal parts: "
            f"{length} = {chunks} × {size} + {rest}. Drop {rest} or add {chunks - rest} rows, or "
            "allow padding with DataProto.from_dict(..., auto_padding=True) or "
            "DataProtoConfig.auto_padding = True"
        )
    return [i * size + min(i, rest) for i in range(chunks + 1)]


def row_number(index: Any, length: int) -> int:
    """A single row number, negative from the end. Raises IndexError when there is no such row."""
    row = int(index)
    if not -length <= row < length:
        raise IndexError(f"row {row} of a batch of {length} rows")
    return row + length if row < 0 else row


def is_row_number(index: Any) -> bool:
    """True for an int, a numpy integer, or an integer tensor or array without dimensions."""
    if isinstance(index, bool | np.bool_):
        return False
    if isinstance(index, int | np.integer):
        return True
    if isinstance(index, torch.Tensor):
        return index.dim() == 0 and not index.dtype.is_floating_point and index.dtype != torch.bool
    return isinstance(index, np.ndarray) and index.ndim == 0 and index.dtype.kind in "iu"


def _as_array(index: Any) -> np.ndarray[Any, Any]:
    if isinstance(index, torch.Tensor):
        return index.detach().cpu().numpy()
    if isinstance(index, np.ndarray):
        return index
    if isinstance(index, Sequence) and not isinstance(index, str | bytes):
        if len(index) == 0:
            return np.empty(0, dtype=np.int64)
        return np.asarray([i.item() if isinstance(i, torch.Tensor) else i for i in index])
    raise ProtocolError(
        "rows are chosen with an int, a slice, a list, a numpy array or a tensor; "
        f"got {type(index).__name__}"
    )


def _from_mask(mask: np.ndarray[Any, Any], length: int) -> Take:
    if len(mask) != length:
        raise ProtocolError(f"a mask over {length} rows has {length} entries; got {len(mask)}")
    return Take(np.flatnonzero(mask).astype(np.int64))


def _check_range(rows: np.ndarray[Any, Any], length: int) -> None:
    low, high = int(rows.min()), int(rows.max())
    if low < -length or high >= length:
        bad = low if low < -length else high
        raise IndexError(f"row {bad} of a batch of {length} rows")
