"""First partitions for the balancer: differencing (Karmarkar and Karp, 1982) and longest first.

Every function splits n items with lengths >= 0 into k partitions and returns a `Table`. Numpy only.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.float64]
"""[n] lengths or costs, at least 0."""

Table = NDArray[np.int64]
"""[k partitions, width]: indices of items, -1 where a partition has fewer items than others."""

# Up to this many items × partitions, differencing item by item in plain Python is cheap, and its
# result is hard to improve.
_SMALL = 4096
# With more than `_MANY` partitions, a spread below `_TOLERANCE` times the mean counts as balanced:
# 0.02 % of a step is not worth a further search.
_TOLERANCE = 2e-4
_MANY = 32


def initial_partitions(lengths: Lengths, k: int, equal_size: bool) -> Iterator[Table]:
    """Yield partitions to improve on, and stop at one that needs no alternative.

    `equal_size` requires that k divides n.
    """
    if len(lengths) % k == 0:
        blocks = difference_blocks(lengths, k)
        yield blocks
        if equal_size or (spread(lengths, blocks) <= tolerated_spread(lengths.sum() / k, k)):
            return
    yield longest_first(lengths, k)
    if len(lengths) * k <= _SMALL:
        yield difference_items(lengths, k)


def spread(lengths: Lengths, table: Table) -> float:
    """Return the largest minus the smallest sum of a partition."""
    # Index -1 selects the appended 0, so gaps add nothing.
    sums = np.append(lengths, 0.0)[table].sum(1)
    return float(sums.max() - sums.min())


def tolerated_spread(mean: float, k: int) -> float:
    """Return the spread below which k partitions with this mean sum count as balanced."""
    return _TOLERANCE * float(mean) if k > _MANY else 0.0


def difference_blocks(lengths: Lengths, k: int) -> Table:
    """Apply differencing to blocks of k items, so that all partitions have n / k items.

    The items are sorted and cut into blocks of k. The two blocks with the largest spread are
    joined, the longest with the shortest, until one block is left. k must divide n.
    """
    # Lengths 9 8 7 6 5 4, k = 3: the blocks 9 8 7 and 6 5 4 both have spread 2.
    #
    #   partition   first block   second block, reversed   sum
    #       0            9                  4               13
    #       1            8                  5               13
    #       2            7                  6               13
    blocks = np.argsort(-lengths, kind="stable").reshape(-1, k)
    # Heap entries: (minus the spread, a number that breaks ties, descending sums, their items).
    queue: list[tuple[float, int, Lengths, Table]] = []
    for number, block in enumerate(blocks):
        sums = lengths[block]
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


def difference_items(lengths: Lengths, k: int) -> Table:
    """Apply the differencing of Karmarkar and Karp item by item; partitions may differ in size.

    A state is k sums in descending order. At first each item is a state of its own. The two states
    with the largest spread are joined, the largest sum with the smallest, until one state is left.
    """
    # Lengths 8 7 6 5 4, k = 2. The states, and their spread in brackets:
    #
    #   8 0 [8]    7 0 [7]    6 0 [6]    5 0 [5]    4 0 [4]
    #   join 8 0 and 7 0:     8+0, 0+7  ->   8  7 [1]
    #   join 6 0 and 5 0:     6+0, 0+5  ->   6  5 [1]
    #   join 4 0 and 8 7:     4+7, 0+8  ->  11  8 [3]
    #   join 11 8 and 6 5:   11+5, 8+6  ->  16 14 [2]    partitions 4 7 5 and 8 6
    #
    # Longest first gives 8+5+4 = 17 and 7+6 = 13. `exchanges.py` turns 16 and 14 into 15 and 15.
    empty: list[tuple[float, list[int]]] = [(0.0, [])] * (k - 1)
    queue = [(-value, i, [(value, [i]), *empty]) for i, value in enumerate(lengths.tolist())]
    heapq.heapify(queue)
    number = len(queue)
    while len(queue) > 1:
        _, _, a = heapq.heappop(queue)
        _, _, b = heapq.heappop(queue)
        joined = [(x[0] + y[0], x[1] + y[1]) for x, y in zip(a, reversed(b), strict=True)]
        joined.sort(key=lambda partition: -partition[0])
        heapq.heappush(queue, (joined[-1][0] - joined[0][0], number, joined))
        number += 1
    return _as_table(_fill_empty([items for _, items in queue[0][2]], lengths))


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
    return _as_table(partitions)


def _fill_empty(partitions: list[list[int]], lengths: Lengths) -> list[list[int]]:
    """Move the shortest item of the partition with most items to each empty partition.

    A partition stays empty only if there are items of length 0.
    """
    for partition in partitions:
        if not partition:
            fullest = max(partitions, key=len)
            shortest = min(fullest, key=lambda i: lengths[i])
            fullest.remove(shortest)
            partition.append(shortest)
    return partitions


def _as_table(partitions: list[list[int]]) -> Table:
    width = max(map(len, partitions))
    padded = [partition + [-1] * (width - len(partition)) for partition in partitions]
    return np.array(padded, dtype=np.int64)
