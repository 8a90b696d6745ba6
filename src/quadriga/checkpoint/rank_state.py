"""Save and load the state of one rank: its blocks of the tensors, scalars and random states."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from quadriga.checkpoint.files import SavedFile, write_tensors
from quadriga.checkpoint.shards import (
    Block,
    Origin,
    open_tensors,
    read_blocks,
    read_indexes,
    write_shard,
)
from quadriga.errors import CheckpointError
from quadriga.observability.jsonl import JsonObject


def save_rank_state(
    folder: str | Path,
    tensors: Mapping[str, Tensor] | Mapping[str, Block],
    scalars: Mapping[str, object],
    *,
    rank: int,
    world_size: int,
    step: int = 0,
) -> list[SavedFile]:
    """Write this rank's blocks of `tensors`, `scalars` (JSON values) and its random states.

    Every rank must call it with the same folder. `step` is written into each file.

    Returns:
        The files, for the marker of the checkpoint.
    """
    folder, origin = Path(folder), Origin(step, rank, world_size)
    folder.mkdir(parents=True, exist_ok=True)
    random_file = write_tensors(_random_file(folder, rank), random_tensors(), origin.as_texts())
    extra = {"scalars": dict(scalars), "random": random_scalars()}
    return [random_file, *write_shard(folder, tensors, extra, origin)]


def read_scalars(folder: str | Path, *, step: int | None = None) -> JsonObject:
    """Return the scalars that rank 0 saved. Raises `CheckpointError` as `load_rank_state`."""
    first = read_indexes(Path(folder), step=step)[0]
    try:
        scalars: JsonObject = {**first.extra["scalars"]}
    except (KeyError, TypeError) as error:
        path = first.path.with_suffix(".json")
        raise CheckpointError(
            f"{path}: its scalars cannot be read: {error}; resume from another checkpoint",
            path=str(path),
        ) from error
    return scalars


def check_all_taken(folder: str | Path, names: Collection[str], prefix: str) -> None:
    """Check that a checkpoint has no tensor that a model would leave out.

    Args:
        names: the tensors that the model takes from the checkpoint.
        prefix: of the stored names that are compared.

    Raises:
        CheckpointError: names such a tensor; or as `read_indexes` raises.
    """
    stored = {name for index in read_indexes(Path(folder)) for name in index.of_tensor}
    left = sorted(name for name in stored if name.startswith(prefix) and name not in names)
    if left:
        raise CheckpointError(
            f"{folder} has trained values of {left[0].removeprefix(prefix)!r}"
            f"{f' and {len(left) - 1} other weights' if len(left) > 1 else ''}, which this model "
            "does not train, so it would mix them with weights of its folder; set model.freeze and "
            "model.lora to what they were in that run, or start a new run from its exported model",
            path=str(folder),
        )


def load_rank_state(
    folder: str | Path,
    tensors: Mapping[str, Tensor] | Mapping[str, Block],
    *,
    rank: int,
    step: int | None = None,
) -> None:
    """Fill `tensors` in place, and restore the random states.

    If fewer ranks wrote the checkpoint, the additional ranks keep their current random states.

    Raises:
        CheckpointError: the folder is missing, incomplete or of another model, or it holds a file
            of another step than `step` (None: than its first file) or of another rank.
    """
    folder = Path(folder)
    indexes = read_indexes(folder, step=step)
    read_blocks(folder, tensors, rank=rank, step=step)
    if rank < len(indexes):
        with open_tensors(_random_file(folder, rank), indexes[rank].origin) as file:
            states = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        path = indexes[rank].path.with_suffix(".json")
        try:
            restore_random(states, indexes[rank].extra["random"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{path}: its random states cannot be restored: {error}; resume from another "
                "checkpoint",
                path=str(path),
            ) from error


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
