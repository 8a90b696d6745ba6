"""Save and load the state of one rank: its blocks of the tensors, scalars and random states."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from quadriga.checkpoint.files import write_tensors
from quadriga.checkpoint.shards import read_blocks, read_indexes, write_shard
from quadriga.observability.jsonl import JsonObject


def save_rank_state(
    folder: str | Path,
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, object],
    *,
    rank: int,
    world_size: int,
) -> None:
    """Write this rank's blocks of `tensors`, `scalars` (JSON values) and its random states.

    Every rank must call it with the same folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(_random_file(folder, rank), random_tensors())
    extra = {"scalars": dict(scalars), "random": random_scalars()}
    write_shard(folder, tensors, extra, rank=rank, world_size=world_size)


def load_rank_state(folder: str | Path, tensors: Mapping[str, Tensor], *, rank: int) -> JsonObject:
    """Fill `tensors` in place, restore the random states, and return the scalars.

    If fewer ranks wrote the checkpoint, the additional ranks keep their current random states.
    Raises `CheckpointError` if the folder is missing, incomplete or of another model.
    """
    folder = Path(folder)
    read_blocks(folder, tensors, rank=rank)
    indexes = read_indexes(folder)
    if rank < len(indexes):
        restore_random(load_file(_random_file(folder, rank)), indexes[rank].extra["random"])
    scalars: JsonObject = indexes[0].extra["scalars"]
    return scalars


def _random_file(folder: Path, rank: int) -> Path:
    return folder / f"random_{rank:05d}.safetensors"


def random_tensors() -> dict[str, Tensor]:
    """Return the states of torch's generators (uint8): of the CPU and of the current GPU."""
    states = {"random.torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["random.cuda"] = torch.cuda.get_rng_state()
    return states


def random_scalars() -> JsonObject:
    """Return the states of the global generators of Python and numpy, as JSON values."""
    version, words, gauss = random.getstate()
    state = np.random.get_state(legacy=False)
    numbers = {"key": state["state"]["key"].tolist(), "pos": int(state["state"]["pos"])}
    return {
        "python": [version, list(words), gauss],
        "numpy": {**state, "state": numbers},
    }


def restore_random(tensors: Mapping[str, Tensor], scalars: JsonObject) -> None:
    """Set all generators to the states that `random_tensors` and `random_scalars` returned."""
    torch.set_rng_state(tensors["random.torch"])
    if "random.cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["random.cuda"])
    # JSON has no tuples and no numpy arrays; the generators accept nothing else.
    version, words, gauss = scalars["python"]
    random.setstate((version, tuple(words), gauss))
    state = scalars["numpy"]
    key = np.array(state["state"]["key"], dtype=np.uint32)
    np.random.set_state({**state, "state": {**state["state"], "key": key}})
