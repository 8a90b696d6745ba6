"""What one rank of an engine saves: its blocks, a few numbers, its random states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from quadriga.checkpoint.files import write_tensors
from quadriga.checkpoint.random_state import random_scalars, random_tensors, restore_random
from quadriga.checkpoint.shards import read_blocks, read_indexes, write_shard


def _random_file(folder: Path, rank: int) -> Path:
    return folder / f"random_{rank:05d}.safetensors"


def save_rank_state(
    folder: str | Path,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
    *,
    rank: int,
    world_size: int,
) -> None:
    """Write this rank's part of `tensors`, `scalars` (JSON values) and random states."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(_random_file(folder, rank), random_tensors())
    extra = {"scalars": dict(scalars), "random": random_scalars()}
    write_shard(folder, tensors, extra, rank=rank, world_size=world_size)


def load_rank_state(
    folder: str | Path, tensors: Mapping[str, Tensor], *, rank: int
) -> dict[str, Any]:
    """Fill `tensors` in place, restore random states, return the scalars.

    Written on fewer ranks, a rank that has no random state of its own keeps the one it has.
    Raises `CheckpointError` for a folder that is missing, incomplete or of another model.
    """
    folder = Path(folder)
    read_blocks(folder, tensors, rank=rank)
    indexes = read_indexes(folder)
    if rank < len(indexes):
        restore_random(load_file(_random_file(folder, rank)), indexes[rank].extra["random"])
    scalars: dict[str, Any] = indexes[0].extra["scalars"]
    return scalars
