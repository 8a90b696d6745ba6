"""A sharded state on disk: each rank writes what it holds, any number of ranks reads it back.

A rank's part is two files: `shard_00000.safetensors` with its blocks, and `shard_00000.json` that
says, for each block, the full tensor's shape and where in it the block begins. Nothing is pickled.
Reading copies the overlap of every stored block with the reader's own block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from quadriga.checkpoint.files import read_json, write_json, write_tensors
from quadriga.errors import CheckpointError

FORMAT = 1


@dataclass(frozen=True)
class Block:
    """This rank's part of a tensor: `data` begins at `offset` in a tensor of `shape`."""

    data: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    is_first_copy: bool  # false where another rank holds the same block and writes it


def block_of(tensor: Tensor, rank: int) -> Block:
    """The block that this rank holds. A plain tensor is whole on every rank; rank 0 writes it."""
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


def _shard_name(rank: int) -> str:
    return f"shard_{rank:05d}"


def write_shard(
    folder: Path,
    tensors: Mapping[str, Tensor],
    extra: Mapping[str, Any],
    *,
    rank: int,
    world_size: int,
) -> None:
    """Write this rank's blocks of `tensors`; `extra` (JSON values) is kept beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    blocks = {name: block_of(tensor.detach(), rank) for name, tensor in tensors.items()}
    kept = {name: b for name, b in blocks.items() if b.is_first_copy and b.data.numel()}
    write_tensors(
        folder / f"{_shard_name(rank)}.safetensors", {name: b.data for name, b in kept.items()}
    )
    index = {
        "format": FORMAT,
        "world_size": world_size,
        "blocks": {n: {"shape": b.shape, "offset": b.offset} for n, b in kept.items()},
        "extra": dict(extra),
    }
    write_json(folder / f"{_shard_name(rank)}.json", index)


@dataclass(frozen=True)
class ShardIndex:
    """What one rank wrote."""

    path: Path
    world_size: int
    blocks: dict[str, dict[str, list[int]]]
    extra: dict[str, Any]


def read_indexes(folder: Path) -> list[ShardIndex]:
    """The indexes of all ranks that wrote `folder`, in rank order.

    Raises `CheckpointError` when the folder or one rank's part is missing.
    """
    first = _read_index(folder, 0)
    return [first, *(_read_index(folder, rank) for rank in range(1, first.world_size))]


def _read_index(folder: Path, rank: int) -> ShardIndex:
    raw = read_json(folder / f"{_shard_name(rank)}.json")
    path = folder / f"{_shard_name(rank)}.safetensors"
    if raw.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {raw.get('format')!r}; this version reads {FORMAT}", path=str(path)
        )
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, its index is there", path=str(path))
    return ShardIndex(path, int(raw["world_size"]), raw["blocks"], raw["extra"])


def read_blocks(folder: Path, tensors: Mapping[str, Tensor], *, rank: int) -> None:
    """Fill `tensors` in place (for DTensors: this rank's block) from every rank's file.

    Raises `CheckpointError` for a tensor that is missing, of another shape, or not wholly there.
    """
    indexes = read_indexes(folder)
    with ExitStack() as stack, torch.no_grad():
        files = [stack.enter_context(safe_open(str(i.path), framework="pt")) for i in indexes]
        for name, tensor in tensors.items():
            block = block_of(tensor.detach(), rank)
            found = 0
            for index, file in zip(indexes, files, strict=True):
                if name in index.blocks:
                    found += _copy_overlap(file, name, index, block)
            if found != block.data.numel():
                raise CheckpointError(
                    f"{folder} holds {found} of the {block.data.numel()} elements of {name!r} that "
                    f"rank {rank} needs; the checkpoint is incomplete or of another model",
                    path=str(folder),
                )


def _copy_overlap(file: Any, name: str, index: ShardIndex, block: Block) -> int:
    stored = index.blocks[name]
    if tuple(stored["shape"]) != block.shape:
        raise CheckpointError(
            f"{index.path}: {name!r} has shape {stored['shape']}, the model has "
            f"{list(block.shape)}; the checkpoint is of another model",
            path=str(index.path),
        )
    source = file.get_slice(name)
    ranges = list(_overlaps(stored["offset"], source.get_shape(), block))
    if any(start >= stop for start, stop in ranges):
        return 0
    there = tuple(slice(a - o, b - o) for (a, b), o in zip(ranges, stored["offset"], strict=True))
    here = tuple(slice(a - o, b - o) for (a, b), o in zip(ranges, block.offset, strict=True))
    part = source[there] if there else file.get_tensor(name)
    block.data[here].copy_(part)
    return part.numel()


def _overlaps(offset: list[int], size: list[int], block: Block) -> Iterator[tuple[int, int]]:
    for start, length, mine, mine_length in zip(
        offset, size, block.offset, block.data.shape, strict=True
    ):
        yield max(start, mine), min(start + length, mine + mine_length)
