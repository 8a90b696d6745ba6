"""Which rows an operation selects, and where the rows of a remote batch are stored.

Every operation that changes rows (slice, reorder, repeat, padding …) becomes a `RowSelection`:
a range of rows, or an array of row numbers.

A remote batch has a `RowMap`. No operation on it reads or moves a stored byte. Fields that were
produced by one call share one `RowMap`, so a selection is computed once for all of them.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from quadriga.errors import FieldError, LengthError, ProtocolError
from quadriga.protocol.storage import Array, Ints, Origin

RowSelection: TypeAlias = range | Ints
"""Rows of a batch: consecutive ones (a range of step 1; a view of local tensors), or their numbers
in any order ([M] int64, repeats allowed; a copy)."""


def chunk_bounds(length: int, chunks: int, uneven: bool) -> list[int]:
    """Return the `chunks + 1` row numbers at which a batch is split.

    Raises `LengthError` when `length` does not divide and `uneven` is False. With `uneven` the
    first chunks have one row more.
    """
    if chunks < 1:
        raise LengthError(f"expected at least 1 part to split a batch into, got {chunks}")
    size, rest = divmod(length, chunks)
    if rest and not uneven:
        raise LengthError(
            f"{length} rows do not divide into {chunks} equal parts: "
            f"{length} = {chunks} × {size} + {rest}. Remove {rest} or add {chunks - rest} rows, or "
            "allow padding with DataProto.from_dict(..., auto_padding=True) or "
            "DataProtoConfig.auto_padding = True"
        )
    return [i * size + min(i, rest) for i in range(chunks + 1)]


# A shard is the rows that one rank produced and stored. A segment is a run of consecutive rows of
# one shard. Two ranks stored shards of 3 rows, a0 a1 a2 and b0 b1 b2; their batch has 6 rows:
#
#     batch row       0   1   2   3   4   5
#     stored row     a0  a1  a2  b0  b1  b2        segments [[0, 0, 3],   shard 0, rows 0, 1, 2
#                    └── segment ┘└── segment ┘              [1, 0, 3]]   shard 1, rows 0, 1, 2
#
#     take range(2, 5)               a2  b0  b1              [[0, 2, 3], [1, 0, 2]]
#     take rows [5, 0, 1]            b2  a0  a1              [[1, 2, 3], [0, 0, 2]]
#     take range(3, 6)               b0  b1  b2              [[0, 0, 3]]: shard a is dropped, and b
#                                                            gets the index 0
#     concat of rows [0, 2), [2, 6)  a0 a1 | a2 b0 b1 b2     [[0, 0, 3], [1, 0, 3]]: the segments
#                                                            [0, 0, 2] and [0, 2, 3] are merged


class Shard(NamedTuple):
    """The rows that one rank stored: a number that no other shard has, its rows, its writer."""

    uid: int
    rows: int
    origin: Origin

    @staticmethod
    def new(rows: int, origin: Origin) -> Shard:
        """Return a shard with a new number: 64 random bits, unique over all processes."""
        return Shard(int.from_bytes(os.urandom(8), "little"), rows, origin)


Plan: TypeAlias = tuple[Ints, tuple[int, ...]]
"""The segments of a selection, and the indices of the shards that they need, in ascending order."""


class RowMap:
    """Where each row of a batch is stored; see the drawing above.

    `segments` [S, 3] int64 in batch order: index of the shard, first row, row after the last.
    """

    def __init__(self, shards: tuple[Shard, ...], segments: Ints) -> None:
        self.shards = shards
        self.segments = segments

    @staticmethod
    def of_shard(shard: Shard) -> RowMap:
        """Return the map of all rows of one shard, in order."""
        if shard.rows == 0:
            return RowMap((), _NO_SEGMENTS)
        return RowMap((shard,), np.array([[0, 0, shard.rows]], dtype=np.int64))

    @cached_property
    def offsets(self) -> Ints:
        """[S + 1]: the batch row at which each segment starts; the last entry is the length."""
        ends = np.zeros(len(self.segments) + 1, dtype=np.int64)
        np.cumsum(self.segments[:, 2] - self.segments[:, 1], out=ends[1:])
        return ends

    @cached_property
    def starts(self) -> list[int]:
        """`offsets` as a list, in which Python finds a row five times as fast as numpy does."""
        starts: list[int] = self.offsets.tolist()
        return starts

    @cached_property
    def content(self) -> bytes:
        """The segments as bytes: equal for maps that differ in their shards only."""
        return self.segments.tobytes()

    def __len__(self) -> int:
        if len(self.segments) == 1:
            return int(self.segments[0, 2] - self.segments[0, 1])
        return self.starts[-1]

    def __reduce__(self) -> tuple[object, ...]:
        return row_map_of, self.flat()

    def flat(self) -> tuple[object, ...]:
        """Return the arguments of `row_map_of`: tuples of numbers and strings, and bytes."""
        origins: dict[Origin, int] = {}
        shards = tuple(
            [(s.uid, s.rows, origins.setdefault(s.origin, len(origins))) for s in self.shards]
        )
        return shards, tuple(map(tuple, origins)), self.segments.tobytes()

    def expand(self) -> tuple[Ints, Ints]:
        """Return the shard index and the row in that shard of each batch row: two arrays [N]."""
        lengths = np.diff(self.offsets)
        shift = np.repeat(self.segments[:, 1] - self.offsets[:-1], lengths)
        rows = np.arange(len(self), dtype=np.int64) + shift
        return np.repeat(self.segments[:, 0], lengths), rows

    def take(self, plan: Plan) -> RowMap:
        """Return the map of a selection from its plan; the shards are renumbered."""
        segments, kept = plan
        return RowMap(tuple([self.shards[s] for s in kept]), segments)

    def plan(self, selection: RowSelection) -> Plan:
        """Return the segments of the selected rows and the shards that they need."""
        if isinstance(selection, range):
            start, stop = selection.start, selection.stop
            if start == stop:
                return _NO_SEGMENTS, ()
            first = bisect_right(self.starts, start) - 1
            last = bisect_left(self.starts, stop)
            if last - first == 1:
                shard, low, _ = self.segments[first].tolist()
                low += start - self.starts[first]
                return np.array([[0, low, low + stop - start]], dtype=np.int64), (shard,)
            # [2, 5) of segments a [0, 3) and b [0, 3): a loses its first 2 rows, b its last 6 - 5.
            segments = self.segments[first:last].copy()
            segments[0, 1] += start - self.starts[first]
            segments[-1, 2] -= self.starts[last] - stop
        elif len(selection) == 0:
            return _NO_SEGMENTS, ()
        else:
            # The last segment that starts at or before a row contains that row.
            which = self.offsets.searchsorted(selection, side="right") - 1
            rows = self.segments[which, 1] + selection - self.offsets[which]
            segments = runs(self.segments[which, 0], rows)
        numbers = segments[:, 0].tolist()
        kept = tuple(sorted(set(numbers)))
        if kept[-1] != len(kept) - 1:
            new = {number: i for i, number in enumerate(kept)}
            segments[:, 0] = [new[number] for number in numbers]
        return segments, kept


_NO_SEGMENTS: Ints = np.empty((0, 3), dtype=np.int64)


def row_map_of(
    shards: Iterable[tuple[int, int, int]],
    writers: Iterable[tuple[str, int, str, str]],
    segments: bytes,
) -> RowMap:
    """Return the row map of a flat form."""
    origins = [Origin(*writer) for writer in writers]
    return RowMap(
        tuple([Shard(uid, rows, origins[writer]) for uid, rows, writer in shards]),
        np.frombuffer(segments, dtype=np.int64).reshape(-1, 3),
    )


def concat(parts: Sequence[RowMap], share: bool = True) -> tuple[RowMap, list[tuple[int, int]]]:
    """Concatenate maps in order.

    Return the map, and for each of its shards the `(part, shard index in that part)` from which it
    is taken. With `share` a shard that several parts name is listed once.
    """
    shards: list[Shard] = []
    sources: list[tuple[int, int]] = []
    known: dict[int, int] = {}
    numbers: list[int] = []
    # Parts that were chunked from one batch name the same shards. A shard is known by its uid, so
    # concatenating all chunks again gives a map with as many shards as the batch had.
    for p, part in enumerate(parts):
        for s, shard in enumerate(part.shards):
            at = known.get(shard.uid) if share else None
            if at is None:
                at = known[shard.uid] = len(shards)
                shards.append(shard)
                sources.append((p, s))
            numbers.append(at)
    return RowMap(tuple(shards), _joined(parts, numbers)), sources


def _joined(parts: Sequence[RowMap], numbers: Sequence[int]) -> Ints:
    """Join segments with renumbered shards; merge those that continue each other."""
    joined: list[list[int]] = []
    base = 0
    for part in parts:
        for shard, start, stop in part.segments.tolist():
            at = numbers[base + shard]
            if joined and joined[-1][0] == at and joined[-1][2] == start:
                joined[-1][2] = stop
            else:
                joined.append([at, start, stop])
        base += len(part.shards)
    return np.array(joined, dtype=np.int64).reshape(-1, 3)


def runs(shard: Ints, row: Ints) -> Ints:
    """Return the segments of single rows: a new one wherever a row does not follow the previous.

    shard [0, 0, 1], row [0, 1, 4] has a break before index 2: [[0, 0, 2], [1, 4, 5]].
    """
    breaks = np.flatnonzero((shard[1:] != shard[:-1]) | (row[1:] != row[:-1] + 1)) + 1
    starts = np.concatenate(([0], breaks))
    ends = np.concatenate((breaks, [len(row)])) - 1
    return np.stack((shard[starts], row[starts], row[ends] + 1), axis=1)


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
