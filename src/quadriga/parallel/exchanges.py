"""Balance partitions by exchanging items between pairs of them.

The heaviest partition is paired with the lightest, the second heaviest with the second lightest,
and so on. All pairs exchange at once, in numpy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quadriga.parallel.initial_partitions import Lengths, Table, tolerated_spread

_MAX_ROUNDS = 64
# Columns of the table that one round looks at. A partition with more items has enough choice in a
# sample, and the search is quadratic in this number.
_MAX_COLUMNS = 48


def exchange_items(lengths: Lengths, table: Table) -> None:
    """Exchange items between partitions, in place, as long as the spread falls.

    An item may also be exchanged for a gap (-1), which moves it. If the heaviest partition gains
    nothing in its pair, it and the lightest are tried against every other partition. If that fails
    too, the partitions are as balanced as single exchanges can make them.
    """
    # Lengths 8 7 6 5 4 with the partitions of `difference_items`, heavy 4 7 5 = 16 and
    # light 8 6 = 14 (a gap counts 0). Half the difference of the sums is 1. Giving a for b changes
    # it to |a − b − 1|, so the best exchange has a − b closest to 1:
    #
    #   |a − b − 1|    b = 8   b = 6   gap
    #        a = 4        5       3      3
    #        a = 7        2       0      6       give 7 for 6: both sums become 15
    #        a = 5        4       2      4
    items = np.append(lengths, 0.0)[table]
    sums = items.sum(1)
    pairs = len(sums) // 2
    tolerated = tolerated_spread(sums.mean(), len(sums))
    for round_number in range(_MAX_ROUNDS):
        order = np.argsort(sums, kind="stable")
        spread = sums[order[-1]] - sums[order[0]]
        if pairs == 0 or spread <= 0:
            return
        columns = _columns(table.shape[1], round_number)
        heavy, light = order[::-1][:pairs], order[:pairs]
        given, taken, better = _best_exchanges(items, sums, heavy, light, columns)
        if better[0]:
            heavy, light = heavy[better], light[better]
            _apply(items, sums, table, heavy, given[better], light, taken[better])
        elif spread <= tolerated or not _exchange_extremes(items, sums, table, order, columns):
            return


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


def _exchange_extremes(
    items: Lengths,
    sums: Lengths,
    table: Table,
    order: NDArray[np.int64],
    columns: NDArray[np.int64],
) -> bool:
    """Lower the heaviest partition, or else raise the lightest. Return whether one was changed.

    Each is tried against every other partition, and the best one of these exchanges is made.
    """
    others = order[:-1]
    heaviest = np.full(len(others), order[-1])
    for heavy, light in ((heaviest, others), (order[1:], np.full(len(others), order[0]))):
        given, taken, better = _best_exchanges(items, sums, heavy, light, columns)
        if better.any():
            moved = items[heavy, given] - items[light, taken]
            # Lowering the heaviest: the larger of the two new sums counts. Raising the lightest:
            # the smaller one counts.
            worst = np.maximum(sums[heavy] - moved, sums[light] + moved)
            if light is not others:
                worst = -np.minimum(sums[heavy] - moved, sums[light] + moved)
            best = np.array([np.where(better, worst, np.inf).argmin()])
            _apply(items, sums, table, heavy[best], given[best], light[best], taken[best])
            return True
    return False


def _apply(
    items: Lengths,
    sums: Lengths,
    table: Table,
    heavy: NDArray[np.int64],
    given: NDArray[np.int64],
    light: NDArray[np.int64],
    taken: NDArray[np.int64],
) -> None:
    """Exchange column `given` of each heavy partition for column `taken` of its light one."""
    moved = items[heavy, given] - items[light, taken]
    sums[heavy] -= moved
    sums[light] += moved
    for matrix in (items, table):
        matrix[heavy, given], matrix[light, taken] = matrix[light, taken], matrix[heavy, given]


def _columns(width: int, round_number: int) -> NDArray[np.int64]:
    """Return all columns, or an even sample of them that shifts by one each round."""
    if width <= _MAX_COLUMNS:
        return np.arange(width)
    return (np.arange(_MAX_COLUMNS) * width // _MAX_COLUMNS + round_number) % width
