"""Sharing out sequences so that every part has about the same number of tokens.

Two uses: equal work for ranks (`get_seqlen_balanced_partitions`), and micro-batches that fit a
token budget (`token_budget_micro_batches`). Numpy only; nothing here knows what a sequence is.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quadriga.errors import LengthError

Lengths = Sequence[int] | Sequence[float] | NDArray[np.generic]

# Exchanges stop after this many rounds at the latest.
_MAX_ROUNDS = 64
# With many parts, a spread below this share of the mean is level: 0.02 % is nobody's loss.
_LEVEL = 2e-4
_MANY = 32
# The most items of a part that one round looks at: a fuller part has choice enough in a sample.
_MAX_ITEMS = 48
# Below so many items × parts, full differencing in plain Python is cheap, and hard to beat.
_SMALL = 4096

Table = NDArray[np.int64]  # [parts, items]: indices of items, -1 where a part has fewer


@dataclass(frozen=True)
class BalanceStats:
    """Tokens a part, as they came and as they were shared out.

    Attributes:
        spread: largest minus smallest part, in the unit of the lengths.
        before_spread: the same for contiguous parts of equal count.
        largest, smallest, mean: of the parts.
        imbalance: largest / mean; 1 is perfect, the excess is idle time.
    """

    spread: float
    before_spread: float
    largest: float
    smallest: float
    mean: float
    imbalance: float


def get_seqlen_balanced_partitions(
    seqlen_list: Lengths, k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Split the indices 0 … n-1 into `k_partitions` parts of about equal total length.

    Starts from the best of two or three constructions (differencing of sorted blocks, longest
    first onto the lightest part, and for small inputs Karmarkar and Karp's full differencing),
    then levels: heavy and light parts are paired, all pairs at once, and each pair makes the one
    exchange that levels it best, until the heaviest finds none.

    Args:
        seqlen_list: n lengths (or costs), at least 0.
        k_partitions: number of parts, at most n.
        equal_size: every part holds n / k_partitions items.

    Returns:
        k_partitions ascending lists of indices, none empty, together each index once. The same
        input gives the same output.

    Raises:
        LengthError: fewer items than parts, a count that does not divide where `equal_size`
            wants it to, or a negative length.
    """
    lengths = np.asarray(seqlen_list, dtype=np.float64).ravel()
    _check(lengths, k_partitions, equal_size)
    table = min(_starts(lengths, k_partitions, equal_size), key=lambda t: _spread(lengths, t))
    _level(lengths, table)
    return [sorted(index for index in row if index >= 0) for row in table.tolist()]


def _check(lengths: NDArray[np.float64], k: int, equal_size: bool) -> None:
    count = len(lengths)
    if k < 1 or count < k:
        raise LengthError(
            f"{count} sequences cannot fill {k} parts; ask for at most {count} parts or give more "
            f"sequences.",
            items=count,
            parts=k,
        )
    if equal_size and count % k:
        raise LengthError(
            f"{count} sequences do not divide into {k} parts of equal size ({count} = "
            f"{count // k} × {k} + {count % k}); pad the batch or allow unequal sizes.",
            items=count,
            parts=k,
        )
    if not np.isfinite(lengths).all() or (lengths < 0).any():
        row = int(np.flatnonzero(~(np.isfinite(lengths) & (lengths >= 0)))[0])
        raise LengthError(
            f"Length {lengths[row]} of sequence {row} is not a number of at least 0.", row=row
        )


def _starts(lengths: NDArray[np.float64], k: int, equal_size: bool) -> Iterator[Table]:
    """First partitions to improve on, until one is level enough not to need another."""
    if len(lengths) % k == 0:
        blocks = _difference_blocks(lengths, k)
        yield blocks
        if equal_size or (_spread(lengths, blocks) <= _enough(lengths.sum() / k, k)):
            return
    yield _longest_first(lengths, k)
    if len(lengths) * k <= _SMALL:
        yield _difference_all(lengths, k)


def _enough(mean: float, k: int) -> float:
    return _LEVEL * float(mean) if k > _MANY else 0.0


def _sums(lengths: NDArray[np.float64], table: Table) -> NDArray[np.float64]:
    return np.asarray(np.append(lengths, 0.0)[table].sum(1))


def _spread(lengths: NDArray[np.float64], table: Table) -> float:
    sums = _sums(lengths, table)
    return float(sums.max() - sums.min())


def _difference_blocks(lengths: NDArray[np.float64], k: int) -> Table:
    """Blocks of k sorted items; the two of largest spread are joined, heavy to light, and again.

    Karmarkar and Karp's method with a block in place of an item: every part gets one item of
    each block. Needs a count that divides.
    """
    blocks = np.argsort(-lengths, kind="stable").reshape(-1, k)
    queue: list[tuple[float, int, NDArray[np.float64], Table]] = []
    for number, block in enumerate(blocks):
        sums = lengths[block]  # descending
        queue.append((float(sums[-1] - sums[0]), number, sums, block[:, None]))
    heapq.heapify(queue)
    number = len(queue)
    while len(queue) > 1:
        _, _, sums_a, table_a = heapq.heappop(queue)
        _, _, sums_b, table_b = heapq.heappop(queue)
        sums = sums_a + sums_b[::-1]
        order = np.argsort(-sums, kind="stable")
        sums = sums[order]
        table = np.concatenate([table_a, table_b[::-1]], axis=1)[order]
        heapq.heappush(queue, (float(sums[-1] - sums[0]), number, sums, table))
        number += 1
    return queue[0][3]


def _difference_all(lengths: NDArray[np.float64], k: int) -> Table:
    """Karmarkar and Karp's differencing, item by item."""
    empty: list[tuple[float, list[int]]] = [(0.0, [])] * (k - 1)
    queue = [(-value, i, [(value, [i]), *empty]) for i, value in enumerate(lengths.tolist())]
    heapq.heapify(queue)
    number = len(queue)
    while len(queue) > 1:
        _, _, a = heapq.heappop(queue)
        _, _, b = heapq.heappop(queue)
        joined = [(x[0] + y[0], x[1] + y[1]) for x, y in zip(a, reversed(b), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(queue, (joined[-1][0] - joined[0][0], number, joined))
        number += 1
    return _as_table(_fill_empty([items for _, items in queue[0][2]], lengths))


def _fill_empty(parts: list[list[int]], lengths: NDArray[np.float64]) -> list[list[int]]:
    """Give each empty part the shortest item of the fullest: only lengths of 0 can need it."""
    for part in parts:
        if not part:
            fullest = max(parts, key=len)
            shortest = min(fullest, key=lambda i: lengths[i])
            fullest.remove(shortest)
            part.append(shortest)
    return parts


def _longest_first(lengths: NDArray[np.float64], k: int) -> Table:
    """Items by falling length, the first k to a part each, the others to the lightest part."""
    order = np.argsort(-lengths, kind="stable").tolist()
    values = lengths.tolist()
    parts = [[index] for index in order[:k]]
    heap = [(values[index], part) for part, index in enumerate(order[:k])]
    heapq.heapify(heap)
    for index in order[k:]:
        total, part = heap[0]
        parts[part].append(index)
        heapq.heapreplace(heap, (total + values[index], part))
    return _as_table(parts)


def _as_table(parts: list[list[int]]) -> Table:
    width = max(map(len, parts))
    return np.array([part + [-1] * (width - len(part)) for part in parts], dtype=np.int64)


def _level(lengths: NDArray[np.float64], table: Table) -> None:
    """Exchange items (or an item against a gap) between parts, in place, while the spread falls.

    A round pairs the r-th heaviest part with the r-th lightest. Once the heaviest gains nothing
    that way, it (and the lightest) is tried against every other part; if that fails too, the
    parts are level.
    """
    items = np.append(lengths, 0.0)[table]
    sums = items.sum(1)
    pairs = len(sums) // 2
    enough = _enough(sums.mean(), len(sums))
    for turn in range(_MAX_ROUNDS):
        order = np.argsort(sums, kind="stable")
        spread = sums[order[-1]] - sums[order[0]]
        if pairs == 0 or spread <= 0:
            return
        columns = _columns(table.shape[1], turn)
        heavy, light = order[::-1][:pairs], order[:pairs]
        given, taken, better = _best_exchanges(items, sums, heavy, light, columns)
        if better[0]:
            heavy, light = heavy[better], light[better]
            _apply(items, sums, table, heavy, given[better], light, taken[better])
        elif spread <= enough or not _level_extremes(items, sums, table, order, columns):
            return


def _best_exchanges(
    items: NDArray[np.float64],
    sums: NDArray[np.float64],
    heavy: NDArray[np.int64],
    light: NDArray[np.int64],
    columns: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """For each pair (heavy, light): the columns to exchange, and whether that levels them.

    Giving a and taking b brings both to within |a − b − half the difference| of their mean.
    """
    half = (sums[heavy] - sums[light]) / 2
    gap = items[heavy][:, columns, None] - items[light][:, None, columns]
    gap -= half[:, None, None]
    np.abs(gap, out=gap)
    gap = gap.reshape(len(half), -1)
    choice = gap.argmin(1)
    better = gap[np.arange(len(half)), choice] < half * (1 - 1e-9)
    given, taken = np.divmod(choice, len(columns))
    return columns[given], columns[taken], better


def _level_extremes(
    items: NDArray[np.float64],
    sums: NDArray[np.float64],
    table: Table,
    order: NDArray[np.int64],
    columns: NDArray[np.int64],
) -> bool:
    """Lower the heaviest part, or failing that raise the lightest, against whichever part suits."""
    everyone = order[:-1]
    heaviest = np.full(len(everyone), order[-1])
    for heavy, light in ((heaviest, everyone), (order[1:], np.full(len(everyone), order[0]))):
        given, taken, better = _best_exchanges(items, sums, heavy, light, columns)
        if better.any():
            moved = items[heavy, given] - items[light, taken]
            worst = np.maximum(sums[heavy] - moved, sums[light] + moved)
            if light is not everyone:
                worst = -np.minimum(sums[heavy] - moved, sums[light] + moved)
            one = np.array([np.where(better, worst, np.inf).argmin()])
            _apply(items, sums, table, heavy[one], given[one], light[one], taken[one])
            return True
    return False


def _apply(
    items: NDArray[np.float64],
    sums: NDArray[np.float64],
    table: Table,
    heavy: NDArray[np.int64],
    given: NDArray[np.int64],
    light: NDArray[np.int64],
    taken: NDArray[np.int64],
) -> None:
    moved = items[heavy, given] - items[light, taken]
    sums[heavy] -= moved
    sums[light] += moved
    for matrix in (items, table):
        matrix[heavy, given], matrix[light, taken] = matrix[light, taken], matrix[heavy, given]


def _columns(width: int, turn: int) -> NDArray[np.int64]:
    """All columns, or an even sample of them that moves from turn to turn."""
    if width <= _MAX_ITEMS:
        return np.arange(width)
    return (np.arange(_MAX_ITEMS) * width // _MAX_ITEMS + turn) % width


def token_budget_micro_batches(
    seqlens: Lengths, max_tokens: int, min_batches: int = 1
) -> list[list[int]]:
    """Split the indices 0 … n-1 into the fewest micro-batches found of at most `max_tokens`.

    First-fit by falling length says how many are enough; the items are then balanced over that
    many, so that no micro-batch is much smaller than the rest.

    Args:
        seqlens: n lengths in tokens. max_tokens: budget of one micro-batch.
        min_batches: at least so many (ranks of one group must agree on the number: take the
            largest over the ranks), at most n.

    Returns:
        Ascending lists of indices, none empty; [] for no sequences.

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
    fitted = _first_fit(lengths, max_tokens)
    number = max(len(fitted), min_batches)
    balanced = get_seqlen_balanced_partitions(lengths, number, equal_size=False)
    if max(lengths[part].sum() for part in balanced) <= max_tokens:
        return balanced
    while len(fitted) < number:  # more are wanted than are needed: halve the one with most items
        fullest = max(fitted, key=len)
        fitted.remove(fullest)
        fitted += [fullest[::2], fullest[1::2]]
    return [sorted(part) for part in fitted]


def _first_fit(lengths: NDArray[np.float64], budget: float) -> list[list[int]]:
    order = np.argsort(-lengths, kind="stable")
    room = np.full(len(lengths), float(budget))
    parts: list[list[int]] = []
    for index in order.tolist():
        part = int(np.argmax(room[: len(parts) + 1] >= lengths[index]))
        if part == len(parts):
            parts.append([])
        parts[part].append(index)
        room[part] -= lengths[index]
    return parts


def balance_stats(seqlen_list: Lengths, partitions: Sequence[Sequence[int]]) -> BalanceStats:
    """How even the parts are, and how even they would have been in the order that they came.

    Raises:
        LengthError: no parts.
    """
    lengths = np.asarray(seqlen_list, dtype=np.float64).ravel()
    if not partitions:
        raise LengthError("There are no parts to describe.", parts=0)
    sums = np.array([lengths[list(part)].sum() for part in partitions])
    before = np.array([chunk.sum() for chunk in np.array_split(lengths, len(partitions))])
    mean = float(sums.mean())
    return BalanceStats(
        spread=float(sums.max() - sums.min()),
        before_spread=float(before.max() - before.min()),
        largest=float(sums.max()),
        smallest=float(sums.min()),
        mean=mean,
        imbalance=float(sums.max()) / mean if mean else 1.0,
    )
