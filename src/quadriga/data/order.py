"""The rows of each epoch: all rows once, or files with weights.

An order is a function of the seed and the number of the epoch, so a run that resumes computes it
again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quadriga.errors import ConfigError

Order = npt.NDArray[np.int64]


def epoch_order(size: int, *, seed: int, epoch: int, shuffle: bool) -> Order:
    """Return the order of the items in an epoch, a permutation [size] int64."""
    if not shuffle:
        return np.arange(size)
    # The pair and not `seed + epoch`, with which epoch 1 of seed 0 would equal epoch 0 of seed 1.
    return np.random.default_rng([seed, epoch]).permutation(size)


@dataclass(frozen=True)
class Mixture:
    """Epochs in which each file has the share of its weight.

    An epoch has as many rows as all files together. A file with a large weight gives some rows
    twice, and one with a small weight gives the rest of its rows in later epochs: all rows of a
    file are used equally often, within one.

    Sizes 4 and 2, weights 1 and 1, without shuffling (rows 0 to 3 and 4 to 5; 3 rows of each):

        epoch 0    0 1 2   4 5 4
        epoch 1    3 0 1   5 4 5

    Args:
        sizes: rows of each file.
        weights: one positive number per file; only their ratios count.

    Raises:
        ConfigError: there is not one positive weight per file, or a file without rows has one.
    """

    sizes: Sequence[int]
    weights: Sequence[float]

    def __post_init__(self) -> None:
        key, given = "data.train_weights", list(self.weights)
        if len(given) != len(self.sizes) or not all(0 < weight < math.inf for weight in given):
            raise ConfigError(
                f"{key} must have one positive number for each of the {len(self.sizes)} training "
                f"files, got {given}",
                key=key,
            )
        if 0 in self.sizes:
            raise ConfigError(
                f"{key}: all prompts of training file {list(self.sizes).index(0)} (counted from 0) "
                "were left out, so it can have no share of the rows; remove the file and its "
                "weight, or increase data.max_prompt_length",
                key=key,
            )

    def order(self, *, seed: int, epoch: int, shuffle: bool) -> Order:
        """Return the rows of an epoch, [Σ sizes] int64."""
        counts = shares(sum(self.sizes), self.weights)
        rows, first = [], 0
        for file, (size, count) in enumerate(zip(self.sizes, counts, strict=True)):
            positions = np.arange(epoch * count, (epoch + 1) * count)
            passes, within = np.divmod(positions, size)
            chosen = np.empty(count, dtype=np.int64)
            for number in np.unique(passes):
                of_file = _seed_of_pass(file, int(number))
                order = epoch_order(size, seed=seed, epoch=of_file, shuffle=shuffle)
                chosen[passes == number] = order[within[passes == number]]
            rows.append(chosen + first)
            first += size
        joined = np.concatenate(rows)
        return joined[epoch_order(len(joined), seed=seed, epoch=epoch, shuffle=shuffle)]


def _seed_of_pass(file: int, number: int) -> int:
    """Return a number for pass `number` over a file, which no epoch and no other file has."""
    return (1 << 48) + (file << 32) + number


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Divide `total` rows in the ratios of `weights`, by largest remainder.

    10 rows with weights 1, 1 and 1: the exact shares are 3.33; the first file gets the fourth row.
    """
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda file: counts[file] - exact[file])
    for file in by_remainder[: total - sum(counts)]:
        counts[file] += 1
    return counts
