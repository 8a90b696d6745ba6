"""Fetch rows without the rest of their shards, where the store can do so at a lower cost.

A batch of 6 rows was permuted, and this process reads rows 4 and 1 of shards a and b, 3 rows each:

    row map    segments [[1, 1, 2], [0, 1, 2]]        row 1 of b, row 1 of a
    another node has b: rows [1] are requested        one row arrives
    row map    segments [[1, 0, 1], [0, 1, 2]]        row 0 of what arrived, row 1 of a
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quadriga.protocol.values.field_spec import Payload
from quadriga.protocol.values.rows import RowMap, runs
from quadriga.protocol.values.storage import Handle, RowRequest, is_row_handle


@dataclass(slots=True)
class CutRows:
    """What was cut for one column: payloads by shard, and the row map into them."""

    row_map: RowMap
    payloads: dict[int, Payload] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request: shard number `shard` of column number `column`."""

    column: int
    shard: int
    request: RowRequest


def cut_rows(columns: Sequence[tuple[RowMap, Sequence[Handle]]]) -> list[CutRows]:
    """Ask for rows of the columns, given as `(row map, handles)`, waiting once for all of them.

    A shard that is not in `payloads` of the result is to be fetched as a whole.
    """
    result = [CutRows(row_map) for row_map, _ in columns]
    asked: list[_Asked] = []
    for number, (row_map, handles) in enumerate(columns):
        asked += _wanted(number, row_map, handles)
    for kind in {type(one.request.handle) for one in asked}:
        mine = [one for one in asked if type(one.request.handle) is kind]
        found = mine[0].request.handle.fetch_rows([one.request for one in mine])
        for one, payload in zip(mine, found, strict=True):
            if payload is not None:
                result[one.column].payloads[one.shard] = payload
    for cut in result:
        if cut.payloads:
            cut.row_map = _renumbered(cut.row_map, cut.payloads)
    return result


def _wanted(column: int, row_map: RowMap, handles: Sequence[Handle]) -> list[_Asked]:
    # pays(0.0) is False for every shard of this node, most often for all of them.
    candidates = [(s, h) for s, h in enumerate(handles) if is_row_handle(h) and h.pays(0.0)]
    if not candidates:
        return []
    shard_of, row_of = row_map.expand()
    counts = np.bincount(shard_of, minlength=len(handles))
    ends = np.cumsum(counts)
    in_shards = row_of[np.argsort(shard_of, kind="stable")]
    asked = []
    for s, handle in candidates:
        if handle.pays(counts[s] / row_map.shards[s].rows):
            rows = in_shards[ends[s] - counts[s] : ends[s]]
            asked.append(_Asked(column, s, RowRequest(handle, rows)))
    return asked


def _renumbered(row_map: RowMap, payloads: dict[int, Payload]) -> RowMap:
    """Return a map in which the rows of a cut shard are numbered in the order of the batch."""
    shard_of, row_of = row_map.expand()
    for shard in payloads:
        mine = shard_of == shard
        row_of[mine] = np.arange(np.count_nonzero(mine))
    return RowMap(row_map.shards, runs(shard_of, row_of))
