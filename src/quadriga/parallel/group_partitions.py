"""Partitions of whole prompt groups, so that each prompt is computed on few ranks.

The rows of a prompt group share their prompt. Rows on one rank compute it once; rows on two ranks
compute it on both. Therefore whole groups are balanced. A group is split only if the groups do not
fit the equal numbers of rows otherwise; each of its pieces computes the prompt again.

Shapes: B rows. Numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quadriga.errors import LengthError
from quadriga.parallel.balancing import get_seqlen_balanced_partitions
from quadriga.parallel.costs import CostModel, Costs, Counts

Rows = list[int]
"""Indices of rows."""


@dataclass(frozen=True)
class RowCosts:
    """What each row of a batch adds to the cost of the rows that are computed with it.

    Attributes:
        group: [B] int64, the number of the row's prompt group.
        shared: [B] float64, cost of the prompt; once for all rows of the group.
        own: [B] float64, cost of the response.
        live: [B] bool, whether the row is computed at all. Rows without response tokens to learn
            from (zero-variance groups that are masked) are not.
    """

    group: NDArray[np.int64]
    shared: Costs
    own: Costs
    live: NDArray[np.bool_]

    @classmethod
    def of(
        cls,
        model: CostModel,
        group: NDArray[np.int64],
        prompt: Counts,
        response: Counts,
        live: NDArray[np.bool_] | None = None,
    ) -> RowCosts:
        """Return the costs of rows by their tokens.

        Args:
            group: [B]. With a number of its own for each row, no prompt is shared.
            prompt, response: [B] tokens.
            live: [B] bool; None: all rows.
        """
        return cls(
            group,
            model.of_prompts(prompt),
            model.of_responses(prompt, response),
            np.ones(len(group), dtype=bool) if live is None else live,
        )

    def __len__(self) -> int:
        return len(self.group)

    def total(self, rows: Sequence[int]) -> float:
        """Return the cost of computing `rows` together."""
        chosen = np.asarray(rows, dtype=np.int64)
        chosen = chosen[self.live[chosen]]
        _, first = np.unique(self.group[chosen], return_index=True)
        return float(self.own[chosen].sum() + self.shared[chosen[first]].sum())

    def groups(self, rows: Sequence[int]) -> list[Rows]:
        """Return the live rows of each prompt group, in the order of `rows`."""
        found: dict[int, Rows] = {}
        for row in rows:
            if self.live[row]:
                found.setdefault(int(self.group[row]), []).append(row)
        return list(found.values())


def arrange_rows(costs: RowCosts, parts: int, rows_per_block: int | None) -> list[list[Rows]]:
    """Balance consecutive blocks of rows, each by itself, over `parts` ranks.

    A block is a mini-batch. It holds the same rows for any number of ranks, so the optimizer steps
    do not depend on that number.

    Args:
        rows_per_block: rows of a mini-batch over all ranks; None: the whole batch is one block.

    Returns:
        For each rank its rows of each block, [parts][blocks].
    """
    size = max(1, rows_per_block or len(costs))
    blocks = [
        partition_groups(costs, range(start, min(start + size, len(costs))), parts)
        for start in range(0, len(costs), size)
    ]
    return [[block[part] for block in blocks] for part in range(parts)]


def partition_groups(costs: RowCosts, rows: Sequence[int], parts: int) -> list[Rows]:
    """Split `rows` into `parts` partitions of about equal cost with whole prompt groups.

    Each partition holds `len(rows) / parts` rows, or at most that number rounded up if it is not
    whole. Groups are split only if they do not fit; rows that are not live fill the partitions up.

    Returns:
        For each partition its rows: group by group in the order of `rows`, then rows that are not
        live.

    Raises:
        LengthError: `parts` is below 1.
    """
    # Three groups of 4 rows over 2 ranks, 6 rows each: groups a and b fit, c is split into pieces
    # of 2 rows, and both ranks compute its prompt.
    #
    #   rank 0   a a a a c c
    #   rank 1   b b b b c c
    if parts < 1:
        raise LengthError(f"{len(rows)} rows cannot be split into {parts} partitions.", parts=parts)
    capacity = -(-len(rows) // parts)
    groups = costs.groups(rows)
    largest = max(map(len, groups), default=1)
    slots = capacity // largest
    if len(groups) <= slots * parts:
        chosen = _whole_groups(costs, groups, parts, slots)
    else:
        chosen = _with_split_groups(costs, groups, parts, capacity)
    rest = [row for row in rows if not costs.live[row]]
    return [_in_order(costs, part) + _take(rest, capacity - len(part)) for part in chosen]


def _whole_groups(costs: RowCosts, groups: list[Rows], parts: int, slots: int) -> list[Rows]:
    """Give each partition up to `slots` groups."""
    if not groups:
        return [[] for _ in range(parts)]
    # Empty slots are items of cost 0: every partition then has the same number of items.
    weights = [costs.total(group) for group in groups] + [0.0] * (slots * parts - len(groups))
    table = get_seqlen_balanced_partitions(weights, parts, equal_size=True)
    return [[row for item in part if item < len(groups) for row in groups[item]] for part in table]


def _with_split_groups(
    costs: RowCosts, groups: list[Rows], parts: int, capacity: int
) -> list[Rows]:
    """Assign the most expensive group first, whole where one fits, then split what is left."""
    chosen: list[Rows] = [[] for _ in range(parts)]
    load = [0.0] * parts

    def assign(rows: Rows, part: int) -> None:
        chosen[part] += rows
        load[part] += costs.total(rows)

    left: list[Rows] = []
    for group in sorted(groups, key=costs.total, reverse=True):
        fitting = [p for p in range(parts) if capacity - len(chosen[p]) >= len(group)]
        if fitting:
            assign(group, min(fitting, key=lambda p: load[p]))
        else:
            left.append(group)
    for group in left:
        remaining = sorted(group, key=lambda row: -costs.own[row])
        while remaining:
            # The partition with the most space gives the fewest pieces.
            part = min(range(parts), key=lambda p: (len(chosen[p]), load[p]))
            size = min(capacity - len(chosen[part]), len(remaining))
            # Evenly spaced in the order of length, so that a piece has long and short responses.
            picked = [remaining[i * len(remaining) // size] for i in range(size)]
            assign(picked, part)
            remaining = [row for row in remaining if row not in picked]
    return chosen


def _in_order(costs: RowCosts, rows: Rows) -> Rows:
    return [row for group in costs.groups(sorted(rows)) for row in group]


def _take(rows: Rows, count: int) -> Rows:
    """Remove the first `count` rows from a list and return them."""
    taken = rows[:count]
    del rows[:count]
    return taken
