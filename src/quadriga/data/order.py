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
        """Return the rows of an epoch, [Σ sizes] int64. Without `shuffle` file follows file."""
        ends = shares(sum(self.sizes), self.weights, epoch + 1)
        starts = shares(sum(self.sizes), self.weights, epoch)
        rows, first = [], 0
        for file, (size, start, end) in enumerate(zip(self.sizes, starts, ends, strict=True)):
            passes, within = np.divmod(np.arange(start, end), size)
            chosen = np.empty(len(passes), dtype=np.int64)
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


def shares(rows: int, weights: Sequence[float], epochs: int) -> list[int]:
    """Return how many rows each file gives in the first `epochs` epochs of `rows` rows.

    A share is rounded down over all epochs, not in each of them, so that a file with less than one
    row an epoch gives its rows too. The file with the largest weight gives what is missing. With 10
    rows and weights 1, 1 and 1:

        epochs   1         2         3
        rows     4 3 3     8 6 6     10 10 10
    """
    counts = [int(rows * epochs * weight / sum(weights)) for weight in weights]
    largest = max(range(len(weights)), key=lambda file: weights[file])
    counts[largest] += rows * epochs - sum(counts)
    return counts
