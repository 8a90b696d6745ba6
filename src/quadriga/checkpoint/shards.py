"""The state of a rank on disk: its blocks of the tensors, scalars and random states.

Each rank writes its blocks, and any number of ranks can read them.

A rank writes two files: `shard_00000.safetensors` holds its blocks, and `shard_00000.json` holds
the shape of the full tensor and the offset in it for each block. To read, a rank copies from every
file the overlap of the stored blocks with its own block. Both files hold the step, the rank and the
number of ranks that wrote them, so a file of another checkpoint is refused.

Example: a tensor with 7 rows was written by 2 ranks and is read by 3 ranks:

    row                 0  1  2  3  4  5  6
    written by          0  0  0  0 │1  1  1      blocks [0, 4) and [4, 7)
    read by             0  0  0 │1  1  1 │2      blocks [0, 3), [3, 6) and [6, 7)

    rank 1 reads rows [3, 4) from shard_00000 and rows [4, 6) from shard_00001

A rank that has several blocks of one tensor names them `name#0`, `name#1` and so on.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from quadriga.checkpoint.files import SavedFile, read_json, write_json, write_tensors
from quadriga.config.paths import local_path
from quadriga.errors import CheckpointError
from quadriga.observability.jsonl import JsonObject
from quadriga.parallel.device import host_empty


@dataclass(frozen=True)
class Block:
    """The part of a tensor that this rank holds.

    Attributes:
        data: the values of the block.
        shape: shape of the full tensor.
        offset: index in the full tensor of the first element of `data`, per dimension.
        is_first_copy: false if a rank with a smaller coordinate holds the same block and writes it.
    """

    data: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    is_first_copy: bool


def block_of(tensor: Tensor | Block, rank: int) -> Block:
    """Return the block of this rank. An unsharded tensor is one block, which rank 0 writes.

    On a mesh of 2 replicas × 2 parameter shards, rank coordinates (0, 0), (0, 1), (1, 0), (1, 1),
    the ranks (0, 0) and (1, 0) hold the same block: only the one with coordinate 0 in the
    replicated dimension has `is_first_copy`.
    """
    if isinstance(tensor, Block):
        return tensor
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return Block(tensor, tuple(tensor.shape), (0,) * tensor.ndim, rank == 0)
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    coordinate = tensor.device_mesh.get_coordinate() or ()
    first = all(
        not placement.is_replicate() or index == 0
        for placement, index in zip(tensor.placements, coordinate, strict=True)
    )
    return Block(tensor.to_local(), tuple(tensor.shape), tuple(offset), first)


@dataclass(frozen=True)
class Origin:
    """Which rank wrote a file at which step."""

    step: int
    rank: int
    world_size: int


def tensor_name(block: str) -> str:
    """Return the name of the tensor of which this is the name of a block."""
    return block.partition("#")[0]


def _shard_name(rank: int) -> str:
    return f"shard_{rank:05d}"


@dataclass(frozen=True)
class ShardIndex:
    """The index of what one rank wrote: of each block, the shape of its tensor and its offset."""

    path: Path
    origin: Origin
    blocks: dict[str, tuple[list[int], list[int]]]
    extra: JsonObject

    @cached_property
    def of_tensor(self) -> dict[str, list[str]]:
        """Name of a tensor -> the names of its blocks."""
        found: dict[str, list[str]] = {}
        for name in self.blocks:
            found.setdefault(tensor_name(name), []).append(name)
        return found


def read_indexes(folder: Path, step: int | None = None) -> list[ShardIndex]:
    """Return the indexes of all ranks that wrote `folder`, in the order of ranks.

    Raises:
        CheckpointError: the folder or the files of a rank are missing, or a file is of another rank
            or of another step than `step` (None: than the file of rank 0).
    """
    first = _read_index(folder, 0)
    expected = replace(first.origin, rank=0, step=first.origin.step if step is None else step)
    indexes = [first]
    indexes += [_read_index(folder, rank) for rank in range(1, expected.world_size)]
    for rank, index in enumerate(indexes):
        _check_origin(index.path.with_suffix(".json"), index.origin, replace(expected, rank=rank))
    return indexes


def _check_origin(path: Path, found: Origin | None, expected: Origin) -> None:
    if found != expected:
        raise CheckpointError(
            f"{path} is {_origin_words(found)}, expected {_origin_words(expected)}: the checkpoint "
            "is mixed from several; resume from another one",
            path=str(path),
        )


def _origin_words(origin: Origin | None) -> str:
    if origin is None:
        return "of unknown origin"
    return f"of step {origin.step}, written by rank {origin.rank} of {origin.world_size}"


def _read_index(folder: Path, rank: int) -> ShardIndex:
    raw = read_json(folder / f"{_shard_name(rank)}.json")
    path = folder / f"{_shard_name(rank)}.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, but its index exists", path=str(path))
    try:
        origin = Origin(int(raw["step"]), int(raw["rank"]), int(raw["world_size"]))
        blocks = {name: (b["shape"], b["offset"]) for name, b in raw["blocks"].items()}
        return ShardIndex(path, origin, blocks, raw["extra"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path.with_suffix('.json')} lacks an entry or has one of another type: {error}",
            path=str(path),
        ) from error


@contextmanager
def open_tensors(path: Path, origin: Origin) -> Iterator[Any]:
    """Open a safetensors file that must have this origin.

    Raises `CheckpointError` if it cannot be read or is of another step or rank.
    """
    try:
        opened = safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read {path}: {error}", path=str(path)) from error
    with opened as file:
        try:
            found = Origin(**{name: int(text) for name, text in (file.metadata() or {}).items()})
        except (TypeError, ValueError):
            found = None
        _check_origin(path, found, origin)
        yield file


def _copy_overlap(file: Any, name: str, index: ShardIndex, block: Block) -> int:
    """Copy the overlap of a stored block and this rank's block; return its number of elements.

    Indices of the overlap are relative to the full tensor. In the example of the module, rank 1
    (block [3, 6), offset 3) reads from file 0 (block [0, 4), offset 0): the overlap is [3, 4),
    which is [3, 4) in the stored block and [0, 1) in the block of rank 1.
    """
    shape, offset = index.blocks[name]
    if tuple(shape) != block.shape:
        raise CheckpointError(
            f"{index.path}: {name!r} has shape {shape}, the model has {list(block.shape)}; the "
            "checkpoint is of another model",
            path=str(index.path),
        )
    source = file.get_slice(name)
    spans = zip(offset, source.get_shape(), block.offset, block.data.shape, strict=True)
    overlap = [(max(a, own), min(a + size, own + width)) for a, size, own, width in spans]
    if any(start >= stop for start, stop in overlap):
        return 0
    in_file = tuple(slice(a - o, b - o) for (a, b), o in zip(overlap, offset, strict=True))
    in_block = tuple(slice(a - o, b - o) for (a, b), o in zip(overlap, block.offset, strict=True))
    part: Tensor = source[in_file] if in_file else file.get_tensor(name)  # a scalar has no index
    block.data[in_block].copy_(part)
    return part.numel()


@dataclass(frozen=True)
class RankState:
    """What one rank holds at a step: its blocks, scalars (JSON values) and its random states.

    Attributes:
        extra: `scalars` and the random states of Python and numpy, for the index.
        random: the random states of torch.
    """

    origin: Origin
    blocks: dict[str, Block]
    extra: JsonObject
    random: dict[str, Tensor]

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor] | Mapping[str, Block],
        scalars: Mapping[str, object],
        origin: Origin,
    ) -> RankState:
        """Return the state with the tensors themselves, which later updates change."""
        blocks = {name: block_of(tensor, origin.rank) for name, tensor in tensors.items()}
        extra = {"scalars": dict(scalars), "random": random_scalars()}
        return cls(origin, blocks, extra, random_tensors())

    def copied(self, into: RankState | None = None, *, whole: bool = False) -> RankState:
        """Return a copy in host memory, which later updates do not change.

        Args:
            into: an earlier copy, whose memory is used again.
            whole: with the blocks that other ranks write into a checkpoint.
        """
        blocks, devices = {}, set[torch.device]()
        for name, block in self.blocks.items():
            if not (whole or block.is_first_copy):
                continue
            data, earlier = block.data, into.blocks.get(name) if into is not None else None
            if earlier is not None and earlier.data.shape == data.shape:
                host = earlier.data
            else:  # copies from CUDA to pinned memory run several at once
                host = host_empty(data.shape, data.dtype, pinned=data.device.type == "cuda")
            blocks[name] = replace(block, data=host.copy_(data, non_blocking=host.is_pinned()))
            devices |= {data.device} if host.is_pinned() else set()
        for device in devices:
            torch.cuda.synchronize(device)
        return replace(self, blocks=blocks, extra=copy.deepcopy(self.extra))

    def write(self, folder: str | Path) -> list[SavedFile]:
        """Write the files of the rank into a folder, and return them for the marker.

        A block of which another rank writes a copy is left out.
        """
        folder, origin = Path(local_path(folder)), self.origin
        folder.mkdir(parents=True, exist_ok=True)
        # The metadata of a safetensors file holds texts only.
        texts = {key: str(value) for key, value in asdict(origin).items()}
        name = _shard_name(origin.rank)
        random_file = write_tensors(_random_file(folder, origin.rank), self.random, texts)
        kept = {key: b for key, b in self.blocks.items() if b.is_first_copy and b.data.numel()}
        data = {key: b.data for key, b in kept.items()}
        written = write_tensors(folder / f"{name}.safetensors", data, texts)
        index = {
            **asdict(origin),
            "blocks": {n: {"shape": b.shape, "offset": b.offset} for n, b in kept.items()},
            "extra": self.extra,
        }
        # The index is written after the tensors, so an index never describes a missing file.
        return [random_file, written, write_json(folder / f"{name}.json", index)]


def read_scalars(folder: str | Path, *, step: int | None = None) -> JsonObject:
    """Return the scalars that rank 0 saved. Raises `CheckpointError` as `load_rank_state`."""
    return {**read_indexes(Path(local_path(folder)), step=step)[0].extra["scalars"]}


def check_all_taken(folder: str | Path, names: Collection[str], prefix: str) -> None:
    """Check that a checkpoint has no tensor that a model would leave out.

    Args:
        names: the tensors that the model takes from the checkpoint.
        prefix: of the stored names that are compared.

    Raises:
        CheckpointError: names such a tensor; or as `read_indexes` raises.
    """
    stored = {name for index in read_indexes(Path(local_path(folder))) for name in index.of_tensor}
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
    """Fill `tensors` in place from the files of all ranks, and restore the random states.

    Of a DTensor, this rank's block is filled. If fewer ranks wrote the checkpoint, the additional
    ranks keep their current random states.

    Raises:
        CheckpointError: the folder is missing or incomplete, a tensor is missing or of another
            shape, or a file is of another step than `step` (None: than the first file) or of
            another rank.
    """
    folder = Path(local_path(folder))
    indexes = read_indexes(folder, step=step)
    with ExitStack() as stack, torch.no_grad():
        files = [stack.enter_context(open_tensors(i.path, i.origin)) for i in indexes]
        for name, tensor in tensors.items():
            block = block_of(tensor, rank)
            found = 0
            for index, file in zip(indexes, files, strict=True):
                for stored in index.of_tensor.get(tensor_name(name), ()):
                    found += _copy_overlap(file, stored, index, block)
            # Stored blocks do not overlap each other, so the number of copied elements tells
            # whether the whole block was filled.
            if found != block.data.numel():
                raise CheckpointError(
                    f"{folder} holds {found} of the {block.data.numel()} elements of {name!r} that "
                    f"rank {rank} needs; the checkpoint is incomplete or of another model",
                    path=str(folder),
                )
    if rank < len(indexes):
        with open_tensors(_random_file(folder, rank), indexes[rank].origin) as file:
            states = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        restore_random(states, indexes[rank].extra["random"])


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
    return {"python": [version, list(words), gauss], "numpy": {**state, "state": numbers}}


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
