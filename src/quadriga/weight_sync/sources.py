"""What the ranks of a training engine hold, and how their weights are read, one at a time."""

from __future__ import annotations

import socket
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from quadriga.checkpoint.shards import Block, block_of
from quadriga.errors import WorkerError
from quadriga.parallel.distributed import gather_over_ranks, rank
from quadriga.parallel.layouts import Box, Layout, StoredTensor, Weight, slices, stored_box
from quadriga.weight_sync.digests import box_digest
from quadriga.weight_sync.planning.plan import Slot, canonical_boxes

OwnWeights = Generator[tuple[str, Tensor | Block], None, None]
"""What a rank has of each weight, by checkpoint name."""


class WeightSource(Protocol):
    """The part of a `TrainEngine` that sends weights."""

    def state_stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, full tensor) of every weight. A tied name follows its weight,
        with the same tensor."""
        ...


@runtime_checkable
class ShardedSource(Protocol):
    """A training engine that can give its shards, so that no rank gathers a weight for sending."""

    def shard_stream(self) -> Iterator[tuple[str, Tensor]] | Iterator[tuple[str, Tensor | Block]]:
        """Yield what `state_stream` yields, in its order, but a sharded weight as a `DTensor` or as
        the block of this rank, which may be empty."""
        ...


def own_weights(source: WeightSource | ShardedSource) -> OwnWeights:
    """Yield (checkpoint name, `DTensor`, block or full tensor) of this rank.

    All ranks must exhaust it, and close it if they cannot: the engine may have loaded its weights
    for it.
    """
    if isinstance(source, ShardedSource):
        yield from source.shard_stream()
    else:
        yield from source.state_stream()


@dataclass(frozen=True)
class SourceWeights:
    """The weights of a training engine over all of its ranks.

    Attributes:
        layout: where each rank has them. The tensors are named as the weights.
        dtypes: weight → dtype in the training engine.
        nodes: rank → node.
    """

    layout: Layout
    dtypes: Mapping[str, torch.dtype]
    nodes: Mapping[int, str]

    def sent_as(self, held: Mapping[str, torch.dtype]) -> SourceWeights:
        """Return the weights in the dtypes in which the rollout engine holds them."""
        dtypes = {name: held.get(name, dtype) for name, dtype in self.dtypes.items()}
        weights = {
            name: Weight(name, weight.shape, dtypes[name].itemsize)
            for name, weight in self.layout.weights.items()
        }
        layout = Layout(weights, self.layout.ranks, self.layout.tied)
        return SourceWeights(layout, dtypes, self.nodes)

    def tied_to(self, weight: str) -> list[str]:
        """Return the names that are tied to a weight."""
        return self._tied.get(weight, [])

    @cached_property
    def _tied(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, weight in self.layout.tied.items():
            found.setdefault(weight, []).append(name)
        return found

    def names(self) -> Iterator[tuple[str, str]]:
        """Yield (checkpoint name, weight that has its elements), tied names included."""
        yield from ((name, name) for name in self.layout.weights)
        yield from self.layout.tied.items()


@dataclass(frozen=True)
class _Own:
    """A weight as one rank has it: `box` of a weight of this shape; or the name of its weight."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    box: Box = ()
    tied_to: str | None = None


def describe(source: WeightSource | ShardedSource) -> SourceWeights:
    """Return what all ranks of a training engine have.

    Waits for: the other ranks. It goes through the weights once, without copying them.

    Raises:
        WorkerError: a name occurs twice, or ranks have weights of other shapes or dtypes.
    """
    gathered = gather_over_ranks((list(_own(source)), socket.gethostname()))
    weights: dict[str, Weight] = {}
    dtypes: dict[str, torch.dtype] = {}
    tied: dict[str, str] = {}
    ranks: dict[int, tuple[StoredTensor, ...]] = {}
    for number, (found, _) in enumerate(gathered):
        tensors = []
        for own in found:
            if own.tied_to is not None:
                tied[own.name] = own.tied_to
                continue
            weight = Weight(own.name, own.shape, own.dtype.itemsize)
            if weights.setdefault(own.name, weight) != weight:
                raise WorkerError(
                    f"weight {own.name!r} has shape {own.shape} on rank {number} of the training "
                    f"engine and {weights[own.name].shape} on another rank",
                    tensor=own.name,
                    rank=number,
                )
            dtypes[own.name] = own.dtype
            tensors.append(stored_box(own.name, own.box))
        ranks[number] = tuple(tensors)
    nodes = {number: node for number, (_, node) in enumerate(gathered)}
    return SourceWeights(Layout(weights, ranks, tied), dtypes, nodes)


def _own(source: WeightSource | ShardedSource) -> Iterator[_Own]:
    seen: set[str] = set()
    last_name, last = "", None
    with closing(own_weights(source)) as stream:
        for name, tensor in stream:
            if name in seen:
                raise _twice(name)
            seen.add(name)
            if tensor is last:
                yield _Own(name, tied_to=last_name)
                continue
            last_name, last = name, tensor
            block = block_of(tensor, rank())
            box = tuple(
                (start, start + size)
                for start, size in zip(block.offset, block.data.shape, strict=True)
            )
            yield _Own(name, block.shape, block.data.dtype, box)


class SourceReader:
    """Reads the weights of this rank in order, and adds up their digests.

    One tensor is held at a time. Going to the next one can be a collective of the engine, so every
    rank must go to every weight.

    Args:
        stream: `own_weights` of the engine.
        weights: of all ranks, in the dtypes in which they are sent.
        rank: this rank in the layout.
    """

    def __init__(self, stream: OwnWeights, weights: SourceWeights, rank: int) -> None:
        self._stream, self._weights = stream, weights
        self._boxes = _by_weight(canonical_boxes(weights.layout)[rank])
        self._seen: set[str] = set()
        self._name, self._tensor = "", torch.empty(0)
        self.shares = dict.fromkeys(weights.layout.weights, 0)
        """Weight → this rank's share of its digest, modulo 2^64."""

    def advance(self, weight: str) -> None:
        while weight != self._name:
            if not self._next():
                raise WorkerError(
                    f"the training engine did not yield weight {weight!r}, which it had before",
                    tensor=weight,
                    tensors=(weight,),
                )

    def tensor(self, name: str) -> Tensor:
        assert name == self._name, (name, self._name)
        return self._tensor

    def finish(self) -> None:
        """Read what no transfer needed, for the digests."""
        while self._next():
            pass

    def _next(self) -> bool:
        """Go to the next weight; return False at the end."""
        for name, tensor in self._stream:
            if name in self._seen:
                raise _twice(name)
            self._seen.add(name)
            if name in self._weights.layout.tied:
                continue
            if name not in self.shares:
                raise WorkerError(
                    f"the training engine yielded weight {name!r}, which it did not have before",
                    tensor=name,
                    tensors=(name,),
                )
            self._name, self._tensor = name, block_of(tensor, 0).data
            shape, dtype = self._weights.layout.weights[name].shape, self._weights.dtypes[name]
            for box, slot in self._boxes.get(name, ()):
                values = self._tensor[slices(slot.box)]
                self.shares[name] += box_digest(values, box, shape, dtype)
            return True
        return False


def _by_weight(
    boxes: Sequence[tuple[str, Box, Slot]],
) -> dict[str, list[tuple[Box, Slot]]]:
    found: dict[str, list[tuple[Box, Slot]]] = {}
    for name, box, slot in boxes:
        found.setdefault(name, []).append((box, slot))
    return found


def _twice(name: str) -> WorkerError:
    return WorkerError(
        f"the training engine yielded weight {name!r} twice", tensor=name, tensors=(name,)
    )
