"""Strategies that share work out: rows over ranks, rows over micro-batches, items over partitions.

- `get_seqlen_balanced_partitions`: partitions of about equal length. A first partition (blocks in
  alternating order, or longest first) is improved by exchanges.
- `token_budget_micro_batches`: few micro-batches that fit a token budget.
- `arrange_rows`, `partition_groups`: rows over ranks with whole prompt groups. The rows of a prompt
  group share their prompt: rows on one rank compute it once, rows on two ranks compute it on both.
- `Balance`: the order of the rows of a batch, so that equal parts of it cost the ranks about the
  same.
- `owners_of`: items over ranks, by size.

The functions see lengths and costs only. Shapes: n items or B rows. Numpy only.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from quadriga.errors import LengthError
from quadriga.parallel.costs import TOKENS, CostModel, Costs, Counts

Lengths = NDArray[np.float64]
"""[n] lengths or costs, at least 0."""

Table = NDArray[np.int64]
"""[k partitions, width]: indices of items, -1 where a partition has fewer items than others."""

_TOLERANCE = 2e-4
"""A spread below this times the mean counts as balanced: 0.02 % of a step is not worth a search."""


def alternating_blocks(lengths: Lengths, k: int) -> Table:
    """Assign items in descending order of length, in blocks of k of which every second is reversed.

    All partitions have n / k items. k must divide n.
    """
    # Lengths 9 8 7 6 5 4, k = 3:
    #
    #   partition   first block   second block, reversed   sum
    #       0            9                  4               13
    #       1            8                  5               13
    #       2            7                  6               13
    blocks = np.argsort(-lengths, kind="stable").reshape(-1, k)
    blocks[1::2] = blocks[1::2, ::-1]
    return blocks.T.copy()


def longest_first(lengths: Lengths, k: int) -> Table:
    """Assign items in descending order of length, each to the partition with the smallest sum.

    The first k items are assigned to one partition each, so that no partition stays empty.
    """
    order = np.argsort(-lengths, kind="stable").tolist()
    values = lengths.tolist()
    partitions = [[index] for index in order[:k]]
    heap = [(values[index], number) for number, index in enumerate(order[:k])]
    heapq.heapify(heap)
    for index in order[k:]:
        total, number = heap[0]
        partitions[number].append(index)
        heapq.heapreplace(heap, (total + values[index], number))
    width = max(map(len, partitions))
    padded = [partition + [-1] * (width - len(partition)) for partition in partitions]
    return np.array(padded, dtype=np.int64)


_MAX_ROUNDS = 64
# Columns of the table that one round looks at. A partition with more items has enough choice in a
# sample, and the search is quadratic in this number.
_MAX_COLUMNS = 48


def exchange_items(lengths: Lengths, table: Table) -> None:
    """Exchange items between partitions, in place, as long as the spread falls.

    The heavier half of the partitions is paired with the lighter half. An item may also be
    exchanged for a gap (-1), which moves it. If the heaviest partition gains nothing in its pair,
    it is tried against every other one. If that fails too, no single exchange makes it lighter.
    """
    # Lengths 8 7 6 5 4 in two partitions, heavy 4 7 5 = 16 and light 8 6 = 14 (a gap counts 0).
    # Half the difference of the sums is 1. Giving a for b changes it to |a − b − 1|, so the best
    # exchange has a − b closest to 1:
    #
    #   |a − b − 1|    b = 8   b = 6   gap
    #        a = 4        5       3      3
    #        a = 7        2       0      6       give 7 for 6: both sums become 15
    #        a = 5        4       2      4
    items = np.append(lengths, 0.0)[table]
    sums = items.sum(1)
    pairs = len(sums) // 2
    tolerated = _TOLERANCE * float(sums.mean())
    for round_number in range(_MAX_ROUNDS):
        order = np.argsort(sums, kind="stable")
        spread = sums[order[-1]] - sums[order[0]]
        if pairs == 0 or spread <= 0:
            return
        columns = _columns(table.shape[1], round_number)
        heavy, light = order[::-1][:pairs], order[:pairs]
        given, taken, better = _best_exchanges(items, sums, heavy, light, columns)
        if not better[0] and spread > tolerated:
            heavy, light = np.full(len(order) - 1, order[-1]), order[:-1]
            given, taken, better = _best_exchanges(items, sums, heavy, light, columns)
            moved = items[heavy, given] - items[light, taken]
            larger = np.where(better, np.maximum(sums[heavy] - moved, sums[light] + moved), np.inf)
            better &= np.arange(len(light)) == larger.argmin()
        if not better.any():
            return
        heavy, given, light, taken = (x[better] for x in (heavy, given, light, taken))
        moved = items[heavy, given] - items[light, taken]
        sums[heavy] -= moved
        sums[light] += moved
        for matrix in (items, table):
            matrix[heavy, given], matrix[light, taken] = matrix[light, taken], matrix[heavy, given]


def _best_exchanges(
    items: Lengths,
    sums: Lengths,
    heavy: NDArray[np.int64],
    light: NDArray[np.int64],
    columns: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return, for each pair, the columns to exchange and whether that reduces the difference.

    Giving a for b leaves both sums within |a − b − half the difference| of their mean.
    """
    half = (sums[heavy] - sums[light]) / 2
    gap = items[heavy][:, columns, None] - items[light][:, None, columns]
    gap -= half[:, None, None]
    np.abs(gap, out=gap)
    gap = gap.reshape(len(half), -1)
    choice = gap.argmin(1)
    # The factor rejects an exchange whose gain is only a rounding error: it could be made for ever.
    better = gap[np.arange(len(half)), choice] < half * (1 - 1e-9)
    given, taken = np.divmod(choice, len(columns))
    return columns[given], columns[taken], better


def _columns(width: int, round_number: int) -> NDArray[np.int64]:
    """Return all columns, or an even sample of them that shifts by one each round."""
    if width <= _MAX_COLUMNS:
        return np.arange(width)
    return (np.arange(_MAX_COLUMNS) * width // _MAX_COLUMNS + round_number) % width


LengthsLike = Sequence[int] | Sequence[float] | NDArray[np.generic]


def get_seqlen_balanced_partitions(
    seqlen_list: LengthsLike, k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Split the indices 0 … n-1 into `k_partitions` partitions of about equal total length.

    Starts with blocks in alternating order (equal sizes) or longest first, and then exchanges items
    between heavy and light partitions until no exchange helps.

    Args:
        seqlen_list: n lengths (or costs), at least 0.
        k_partitions: number of partitions, at most n.
        equal_size: every partition holds n / k_partitions items.

    Returns:
        k_partitions ascending lists of indices. None is empty, and each index is in exactly one.
        The same input gives the same output.

    Raises:
        LengthError: there are fewer items than partitions, or n is not divisible by k_partitions
            although `equal_size` is set.
    """
    lengths = np.asarray(seqlen_list, dtype=np.float64).ravel()
    _check(lengths, k_partitions, equal_size)
    first = alternating_blocks if equal_size else longest_first
    table = first(lengths, k_partitions)
    exchange_items(lengths, table)
    return [sorted(index for index in row if index >= 0) for row in table.tolist()]


def owners_of(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return for each item the rank that has it: the largest first, each to the lightest rank.

    The loads of `ranks` differ by one item at most. Items of equal size are in their order.
    """
    # Sizes 2 5 3 4 on 2 ranks: 5 → 0, 4 → 1, 3 → 1 (4 < 5), 2 → 0. Result: 0 0 1 1.
    loads, owners = [0] * ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[index] = owner = loads.index(min(loads))
        loads[owner] += sizes[index]
    return owners


def _check(lengths: NDArray[np.float64], k: int, equal_size: bool) -> None:
    count = len(lengths)
    if k < 1 or count < k:
        raise LengthError(
            f"{count} sequences cannot fill {k} partitions; the number of partitions must be at "
            "least 1 and at most the number of sequences.",
            items=count,
            parts=k,
        )
    if equal_size and count % k:
        raise LengthError(
            f"{count} sequences do not divide into {k} partitions of equal size ({count} = "
            f"{count // k} × {k} + {count % k}); pad the batch or allow unequal sizes.",
            items=count,
            parts=k,
        )


def token_budget_micro_batches(
    seqlens: LengthsLike, max_tokens: int, min_batches: int = 1, *, costs: LengthsLike | None = None
) -> list[list[int]]:
    """Split the indices 0 … n-1 into few micro-batches of at most `max_tokens` tokens each.

    First-fit decreasing gives the number of micro-batches. The sequences are then balanced over
    that number, so that no micro-batch is much smaller than the others.

    Args:
        seqlens: n lengths in tokens.
        max_tokens: budget of one micro-batch.
        min_batches: smallest number of micro-batches, at most n. The ranks of a group must have
            the same number: give the largest over the ranks.
        costs: n costs, which are balanced where the budget allows it; None: the lengths.

    Returns:
        Ascending lists of indices, none empty; [] if there are no sequences.

    Raises:
        LengthError: one sequence is longer than the budget, or `min_batches` is above n.
    """
    lengths = np.asarray(seqlens, dtype=np.float64).ravel()
    if len(lengths) == 0 and min_batches <= 1:
        return []
    _check(lengths, max(min_batches, 1), equal_size=False)
    if lengths.max() > max_tokens:
        row = int(lengths.argmax())
        raise LengthError(
            f"Sequence {row} has {int(lengths[row])} tokens, more than the {max_tokens} that one "
            f"micro-batch may hold; raise the budget to at least {int(lengths[row])}.",
            row=row,
            length=int(lengths[row]),
            max_tokens=max_tokens,
        )
    fitted = _first_fit_decreasing(lengths, max_tokens)
    number = max(len(fitted), min_batches)
    for weights in (lengths,) if costs is None else (costs, lengths):
        balanced = get_seqlen_balanced_partitions(weights, number, equal_size=False)
        if max(lengths[micro_batch].sum() for micro_batch in balanced) <= max_tokens:
            return balanced
    # Balancing minimises the spread, not the maximum, so it may exceed the budget by a little.
    # First fit never does. If more micro-batches are required than it made, halve the fullest.
    while len(fitted) < number:
        fullest = max(fitted, key=len)
        fitted.remove(fullest)
        fitted += [fullest[::2], fullest[1::2]]
    return [sorted(micro_batch) for micro_batch in fitted]


def _first_fit_decreasing(lengths: NDArray[np.float64], budget: float) -> list[list[int]]:
    """Put each sequence, longest first, into the first micro-batch that has tokens left for it."""
    # Lengths 60 50 40 30 20, budget 100. The tokens left in each micro-batch:
    #
    #   sequence          60    50       40      30      20
    #   micro-batch 0     40    40        0       0       0      60 + 40
    #   micro-batch 1   (100)   50       50      20       0      50 + 30 + 20
    #
    # `left` has one entry more than there are micro-batches: the next, empty one.
    order = np.argsort(-lengths, kind="stable")
    left = np.full(len(lengths), float(budget))
    micro_batches: list[list[int]] = []
    for index in order.tolist():
        number = int(np.argmax(left[: len(micro_batches) + 1] >= lengths[index]))
        if number == len(micro_batches):
            micro_batches.append([])
        micro_batches[number].append(index)
        left[number] -= lengths[index]
    return micro_batches


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
    """
    # Three groups of 4 rows over 2 ranks, 6 rows each: groups a and b fit, c is split into pieces
    # of 2 rows, and both ranks compute its prompt.
    #
    #   rank 0   a a a a c c
    #   rank 1   b b b b c c
    capacity = -(-len(rows) // parts)
    groups = costs.groups(rows)
    largest = max(map(len, groups), default=1)
    slots = capacity // largest
    if len(groups) <= slots * parts:
        chosen = _whole_groups(costs, groups, parts, slots)
    else:
        chosen = _with_split_groups(costs, groups, parts, capacity)
    rest = (row for row in rows if not costs.live[row])
    return [[*_in_order(costs, part), *islice(rest, capacity - len(part))] for part in chosen]


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


# The order of rows. A worker group splits a batch into equal parts of neighbouring rows, one for
# each rank, and a rank cuts its part into mini-batches in order.


@dataclass(frozen=True)
class Balance:
    """What the order of the rows depends on.

    Attributes:
        ranks: ranks of the actor.
        enabled: False: rows keep their order within a mini-batch.
        mini_batch_rows: rows of a mini-batch over all ranks, each of which is balanced by itself;
            None: the whole batch.
        cost: the cost of the actor's sequences.
        shares_prompts: whether the training engine computes a prompt that several rows of a rank
            share once.
        whole_groups: whether the responses of one prompt are kept on one rank.
        masked: whether the rows that the update leaves out are known and masked.
        skips: whether advantages are known, and rows whose advantages are all 0 are left out.
        critic_ranks: ranks of the critic; None: as many as the actor has.
        critic_mini_batch_rows: rows of a mini-batch of the critic over all ranks; None: the batch.
    """

    ranks: int
    enabled: bool = True
    mini_batch_rows: int | None = None
    cost: CostModel = TOKENS
    shares_prompts: bool = True
    whole_groups: bool = True
    masked: bool = False
    skips: bool = False
    critic_ranks: int | None = None
    critic_mini_batch_rows: int | None = None

    def unbalanced(self, rows: int) -> NDArray[np.int64]:
        """Return the order [B] in which each mini-batch has the same rows for any number of ranks.

        `rows`: B, a multiple of the number of ranks.
        """
        # 8 rows on 2 ranks in mini-batches of 4 rows: a rank has half of each mini-batch.
        #
        #   rank 0   0 1 | 4 5        rank 1   2 3 | 6 7
        size = self.mini_batch_rows or max(rows, 1)
        blocks = [np.arange(start, min(start + size, rows)) for start in range(0, rows, size)]
        pieces = [np.array_split(block, self.ranks) for block in blocks]
        parts = [part[rank] for rank in range(self.ranks) for part in pieces]
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts])

    def critic_order(self, rows: int) -> NDArray[np.int64] | None:
        """Return the order in which a critic on another number of ranks gets the rows of a batch
        that is ordered for the actor, so that it has the mini-batches that one rank has.

        None: the order of the actor, which fits the ranks of the critic, or all rows are one
        mini-batch, or they do not divide by its ranks.
        """
        # 8 rows in mini-batches of 4, on 2 ranks of the actor and 1 of the critic:
        #
        #   actor    rank 0   0 1 | 4 5     rank 1   2 3 | 6 7
        #   critic   rank 0   0 1 2 3 | 4 5 6 7
        ranks, size = self.critic_ranks or self.ranks, self.critic_mini_batch_rows or rows
        if ranks == self.ranks or rows <= size or rows % ranks:
            return None
        by_unit = np.arange(rows)
        if rows % self.ranks == 0:  # otherwise the batch was not ordered for the actor
            by_unit = by_unit[np.argsort(self.unbalanced(rows))]
        critic = Balance(ranks, enabled=False, mini_batch_rows=size)
        return by_unit[critic.unbalanced(rows)]

    def arrange(
        self, uid: Sequence[object], prompt: Counts, response: Counts, live: NDArray[np.bool_]
    ) -> Arrangement:
        """Order B rows by ids of prompt groups, tokens, and whether a row has one to learn from."""
        numbers = {key: number for number, key in enumerate(dict.fromkeys(uid))}
        group = np.array([numbers[key] for key in uid], dtype=np.int64)
        single = np.arange(len(group))
        costs = RowCosts.of(
            self.cost, group if self.whole_groups else single, prompt, response, live
        )
        rows = arrange_rows(costs, self.ranks, self.mini_batch_rows)
        computed = group if self.shares_prompts else single
        return Arrangement(
            rows,
            RowCosts.of(TOKENS, computed, prompt, response, live),
            RowCosts.of(self.cost, computed, prompt, response, live),
        )


@dataclass(frozen=True)
class Arrangement:
    """The row numbers of [ranks][mini-batches], and the tokens and FLOPs that they compute."""

    rows: list[list[list[int]]]
    tokens: RowCosts
    costs: RowCosts

    @property
    def order(self) -> NDArray[np.int64]:
        """The new order of the rows, [B]."""
        return np.array([row for rank in self.rows for block in rank for row in block])

    def metrics(self) -> dict[str, float]:
        """Measure the balance."""
        tokens = [sum(map(self.tokens.total, rank)) for rank in self.rows]
        cost = np.array([[self.costs.total(block) for block in rank] for rank in self.rows])
        # All ranks wait for the slowest one at each optimizer step.
        waited, mean = cost.max(0).sum(), cost.mean(0).sum()
        return {
            "batch/token_spread": (max(tokens) - min(tokens)) / max(1.0, *tokens),
            "batch/cost_imbalance": float(waited / mean) if mean else 1.0,
        }
