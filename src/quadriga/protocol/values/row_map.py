"""Where the rows of a batch lie: the arithmetic of references.

A *block* is one shard that one rank stored. A batch by reference is a list of *segments*, each a
run of rows of one block. Slicing, permuting, repeating and joining a batch only rewrite the
segments; fields that were made together share one `Rows`, so this happens once for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from quadriga.protocol.values.row_selection import RowOp, Span
from quadriga.protocol.values.storage import Origin

Ints = np.ndarray[Any, np.dtype[np.int64]]
Plans = dict[bytes, tuple[Ints, tuple[int, ...]]]


_FEW = 4096
"""Up to this many segments a Python loop is quicker than numpy on many small arrays."""


def new_uid() -> int:
    """A number that no other block has, in any process."""
    return int.from_bytes(os.urandom(8), "little")


@dataclass(frozen=True, slots=True)
class Block:
    """One stored shard: a name that no other block has, its number of rows, who made it."""

    uid: int
    rows: int
    origin: Origin

    def __reduce__(self) -> tuple[Any, ...]:
        return Block, (self.uid, self.rows, self.origin)


@dataclass(frozen=True, eq=False)
class Rows:
    """`segments` [S, 3] int64: block index, first row, row after the last; in batch order."""

    blocks: tuple[Block, ...]
    segments: Ints

    @staticmethod
    def whole(block: Block) -> Rows:
        """All rows of one block, in order."""
        if block.rows == 0:
            return Rows((), np.empty((0, 3), dtype=np.int64))
        return Rows((block,), np.array([[0, 0, block.rows]], dtype=np.int64))

    @cached_property
    def offsets(self) -> Ints:
        """[S + 1]: the batch row at which each segment starts; the last is the length."""
        ends = np.zeros(len(self.segments) + 1, dtype=np.int64)
        np.cumsum(self.segments[:, 2] - self.segments[:, 1], out=ends[1:])
        return ends

    @cached_property
    def content(self) -> bytes:
        """The segments as bytes: equal for layouts that differ in their blocks only."""
        return self.segments.tobytes()

    def __len__(self) -> int:
        if len(self.segments) == 1:
            return int(self.segments[0, 2] - self.segments[0, 1])
        return int(self.offsets[-1])

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.blocks, self.segments.tobytes())

    def expand(self) -> tuple[Ints, Ints]:
        """Block index and row in that block of each batch row: two arrays [N]."""
        lengths = np.diff(self.offsets)
        shift = np.repeat(self.segments[:, 1] - self.offsets[:-1], lengths)
        return (
            np.repeat(self.segments[:, 0], lengths),
            np.arange(len(self), dtype=np.int64) + shift,
        )

    def take(self, op: RowOp, plans: Plans | None = None) -> tuple[Rows, tuple[int, ...]]:
        """The rows of `op`, and the indices of the blocks that they still need, in new order.

        `plans` remembers the work within one operation: layouts with the same segments over
        different blocks, as results of several calls have, are composed once.
        """
        if isinstance(op, Span) and op.start == 0 and op.stop == len(self):
            return self, tuple(range(len(self.blocks)))
        plan = None if plans is None else plans.get(self.content)
        if plan is None:
            segments = self._span(op) if isinstance(op, Span) else self._gather(op.rows)
            plan = _drop_unused(segments)
            if plans is not None:
                plans[self.content] = plan
        segments, kept = plan
        return Rows(tuple([self.blocks[b] for b in kept]), segments), kept

    def _span(self, span: Span) -> Ints:
        start, stop = span.start, span.stop
        if start >= stop:
            return np.empty((0, 3), dtype=np.int64)
        if len(self.segments) == 1:
            block, first_row, _ = self.segments[0].tolist()
            return np.array([[block, first_row + start, first_row + stop]], dtype=np.int64)
        first = int(self.offsets.searchsorted(start, side="right")) - 1
        last = int(self.offsets.searchsorted(stop, side="left"))
        segments = self.segments[first:last].copy()
        segments[0, 1] += start - self.offsets[first]
        segments[-1, 2] -= self.offsets[last] - stop
        return segments

    def _gather(self, rows: Ints) -> Ints:
        if len(rows) == 0:
            return np.empty((0, 3), dtype=np.int64)
        which = self.offsets.searchsorted(rows, side="right") - 1
        block = self.segments[which, 0]
        row = self.segments[which, 1] + rows - self.offsets[which]
        return _runs(block, row)


def _rebuild(blocks: tuple[Block, ...], segments: bytes) -> Rows:
    return Rows(blocks, np.frombuffer(segments, dtype=np.int64).reshape(-1, 3))


def concat(parts: Sequence[Rows], share: bool = True) -> tuple[Rows, list[tuple[int, int]]]:
    """All parts one after the other, and for each block of the result the `(part, block index)`
    that it comes from. With `share`, a block that several parts name appears once."""
    blocks: list[Block] = []
    sources: list[tuple[int, int]] = []
    known: dict[int, int] = {}
    numbers: list[list[int]] = []
    for p, rows in enumerate(parts):
        renumbered = []
        for b, block in enumerate(rows.blocks):
            at = known.get(block.uid) if share else None
            if at is None:
                at = known[block.uid] = len(blocks)
                blocks.append(block)
                sources.append((p, b))
            renumbered.append(at)
        numbers.append(renumbered)
    join = _join_few if sum(len(rows.segments) for rows in parts) <= _FEW else _join_many
    return Rows(tuple(blocks), join([rows.segments for rows in parts], numbers)), sources


def _join_few(segments: Sequence[Ints], numbers: Sequence[list[int]]) -> Ints:
    """Segments with their blocks renumbered, those that continue each other made one."""
    joined: list[list[int]] = []
    for part, renumbered in zip(segments, numbers, strict=True):
        for block, start, stop in part.tolist():
            at = renumbered[block]
            if joined and joined[-1][0] == at and joined[-1][2] == start:
                joined[-1][2] = stop
            else:
                joined.append([at, start, stop])
    return np.array(joined, dtype=np.int64).reshape(-1, 3)


def _join_many(segments: Sequence[Ints], numbers: Sequence[list[int]]) -> Ints:
    """As `_join_few`, for permuted batches of many rows."""
    pieces = []
    for part, renumbered in zip(segments, numbers, strict=True):
        piece = part.copy()
        piece[:, 0] = np.array(renumbered, dtype=np.int64)[piece[:, 0]]
        pieces.append(piece)
    return _merge_runs(np.concatenate(pieces))


def _runs(block: Ints, row: Ints) -> Ints:
    """Segments of rows given one by one: a new one wherever the next row does not follow."""
    breaks = np.flatnonzero((block[1:] != block[:-1]) | (row[1:] != row[:-1] + 1)) + 1
    starts = np.concatenate(([0], breaks))
    ends = np.concatenate((breaks, [len(row)])) - 1
    return np.stack((block[starts], row[starts], row[ends] + 1), axis=1)


def _merge_runs(segments: Ints) -> Ints:
    """Neighbouring segments that continue each other become one."""
    if len(segments) < 2:
        return segments
    follows = (segments[1:, 0] == segments[:-1, 0]) & (segments[1:, 1] == segments[:-1, 2])
    if not follows.any():
        return segments
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    ends = np.concatenate((starts[1:], [len(segments)])) - 1
    return np.stack((segments[starts, 0], segments[starts, 1], segments[ends, 2]), axis=1)


def _drop_unused(segments: Ints) -> tuple[Ints, tuple[int, ...]]:
    """Segments numbered by the blocks that they need, and which those are."""
    if len(segments) == 1:
        only = int(segments[0, 0])
        segments[0, 0] = 0
        return segments, (only,)
    used, renumbered = np.unique(segments[:, 0], return_inverse=True)
    segments[:, 0] = renumbered.reshape(-1)
    return segments, tuple(used.tolist())
