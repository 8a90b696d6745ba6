"""Batches in a seeded order that can be left and taken up again at any batch.

The order of an epoch depends on the seed, the epoch's number and the dataset's size, and on
nothing else. Items are in memory, tokenised once, so batches are made where they are asked for:
no worker processes, and a state that is only two numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from quadriga.errors import CheckpointError, ConfigError
from quadriga.protocol import DataProto


class Collating(Protocol):
    """A dataset that knows how to join its items into a batch."""

    def __len__(self) -> int: ...
    def __getitem__(self, place: int, /) -> dict[str, Any]: ...
    def collate(self, items: Sequence[dict[str, Any]], /) -> DataProto: ...


def epoch_order(size: int, *, seed: int, epoch: int, shuffle: bool) -> np.ndarray[Any, Any]:
    """The places of an epoch's items, [size] int64."""
    if not shuffle:
        return np.arange(size)
    return np.random.default_rng([seed, epoch]).permutation(size)


class PromptLoader:
    """Iterating gives the batches of the epoch it is in, from where it stands to the epoch's end.

    Each new `for` goes on where the last one stopped; after the end of an epoch, with the next.
    `state_dict` between two batches counts the batches that were handed out.

    Raises `ConfigError` when the dataset does not hold one whole batch and `drop_last` is set.
    """

    def __init__(
        self,
        dataset: Collating,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, got {batch_size}")
        if drop_last and len(dataset) < batch_size:
            raise ConfigError(
                f"one batch takes {batch_size} rows, but the data has {len(dataset)}; "
                "lower the batch size or give more data"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.batches_done = 0

    def __len__(self) -> int:
        """Batches an epoch."""
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[DataProto]:
        order = epoch_order(
            len(self.dataset), seed=self.seed, epoch=self.epoch, shuffle=self.shuffle
        )
        while self.batches_done < len(self):
            start = self.batches_done * self.batch_size
            places = order[start : start + self.batch_size]
            self.batches_done += 1
            yield self.dataset.collate([self.dataset[int(place)] for place in places])
        self.epoch += 1
        self.batches_done = 0

    def state_dict(self) -> dict[str, int]:
        """Where the loader stands, and what it must agree with to be taken up again."""
        return {
            "epoch": self.epoch,
            "batches_done": self.batches_done,
            "rows": len(self.dataset),
            "batch_size": self.batch_size,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Stand where `state` stood.

        Raises `CheckpointError` when rows, batch size or seed differ: the order would be another.
        """
        mine = self.state_dict()
        for key in ("rows", "batch_size", "seed"):
            if state[key] != mine[key]:
                raise CheckpointError(
                    f"the data position was saved with {key} {state[key]}, this run has "
                    f"{mine[key]}; go on with the same data, or start without the checkpoint"
                )
        self.epoch = state["epoch"]
        self.batches_done = state["batches_done"]


class SFTLoader(PromptLoader):
    """The same for prompts with answers."""
