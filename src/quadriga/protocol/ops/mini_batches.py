"""Which rows make the mini-batches of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from quadriga.errors import LengthError


def mini_batch_rows(
    length: int, size: int, epochs: int, seed: int | None, loader_kwargs: Mapping[str, Any]
) -> Iterator[list[int]]:
    """`length // size * epochs` lists of rows; checked here, drawn lazily."""
    if size < 1 or length % size:
        raise LengthError(
            f"{length} rows do not divide into mini-batches of {size}: "
            f"{length} = {size} × {length // max(size, 1)} + {length % max(size, 1)}"
        )
    return _draw(length, size, epochs, seed, loader_kwargs)


def _draw(
    length: int, size: int, epochs: int, seed: int | None, loader_kwargs: Mapping[str, Any]
) -> Iterator[list[int]]:
    if length == 0:
        return
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    loader: DataLoader[Any] = DataLoader(
        cast(Any, range(length)),
        batch_size=size,
        collate_fn=list,
        generator=generator,
        **loader_kwargs,
    )
    for _ in range(epochs):
        yield from loader
