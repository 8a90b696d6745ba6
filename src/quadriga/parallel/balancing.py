"""Partitions and micro-batches with about the same number of tokens.

- `get_seqlen_balanced_partitions`: equal work for ranks.
- `token_budget_micro_batches`: micro-batches that fit a token budget.

The functions see lengths only. Numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quadriga.errors import LengthError
from quadriga.parallel.exchanges import exchange_items
from quadriga.parallel.initial_partitions import initial_partitions, spread

LengthsLike = Sequence[int] | Sequence[float] | NDArray[np.generic]


@dataclass(frozen=True)
class BalanceStats:
    """Token counts of the partitions, before and after balancing.

    Attributes:
        spread: largest minus smallest sum of a partition, in the unit of the lengths.
        before_spread: the same for contiguous partitions with equal numbers of items.
        largest, smallest, mean: sums of the partitions.
        imbalance: largest / mean. 1 is perfect; the excess is idle time of the other ranks.
    """

    spread: float
    before_spread: float
    largest: float
    smallest: float
    mean: float
    imbalance: float


def get_seqlen_balanced_partitions(
    seqlen_list: LengthsLike, k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Split the indices 0 … n-1 into `k_partitions` partitions of about equal total length.

    Takes the best of two or three initial partitions (differencing of sorted blocks; longest
    first; for small inputs, Karmarkar and Karp's differencing item by item), and then exchanges
    items between heavy and light partitions until no exchange helps.

    Args:
        seqlen_list: n lengths (or costs), at least 0.
        k_partitions: number of partitions, at most n.
        equal_size: every partition holds n / k_partitions items.

    Returns:
        k_partitions ascending lists of indices. None is empty, and each index is in exactly one.
        The same input gives the same output.

    Raises:
        LengthError: there are fewer items than partitions, n is not divisible by k_partitions
            although `equal_size` is set, or a length is negative or not finite.
    """
    lengths = np.asarray(seqlen_list, dtype=np.float64).ravel()
    _check(lengths, k_partitions, equal_size)
    candidates = initial_partitions(lengths, k_partitions, equal_size)
    table = min(candidates, key=lambda candidate: spread(lengths, candidate))
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
    if not np.isfinite(lengths).all() or (lengths < 0).any():
        row = int(np.flatnonzero(~(np.isfinite(lengths) & (lengths >= 0)))[0])
        raise LengthError(
            f"Length {lengths[row]} of sequence {row} is not a finite number of at least 0.",
            row=row,
        )


def token_budget_micro_batches(
    seqlens: LengthsLike,
    max_tokens: int,
    min_batches: int = 1,
    *,
    costs: LengthsLike | None = None,
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


def balance_stats(seqlen_list: LengthsLike, partitions: Sequence[Sequence[int]]) -> BalanceStats:
    """Measure the balance of `partitions`, and that of contiguous partitions for comparison.

    Raises:
        LengthError: `partitions` is empty.
    """
    lengths = np.asarray(seqlen_list, dtype=np.float64).ravel()
    if not partitions:
        raise LengthError("There are no partitions to measure.", parts=0)
    sums = np.array([lengths[list(partition)].sum() for partition in partitions])
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
