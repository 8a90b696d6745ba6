"""What the ranks of a training engine hold, and how their weights are read, one at a time."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from quadriga.checkpoint.shards import block_of
from quadriga.engines.base import OwnWeights, TrainEngine, WeightPart
from quadriga.errors import WorkerError
from quadriga.parallel.distributed import gather_over_ranks, rank
from quadriga.parallel.layouts import (
    Box,
    Layout,
    StoredTensor,
    Weight,
    count,
    slices,
    stored_box,
    whole,
)
from quadriga.weight_sync.plan import Slot, canonical_boxes
from quadriga.weight_sync.verification import box_digest, signed


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
        return SourceWeights(replace(self.layout, weights=weights), dtypes, self.nodes)

    def names_of(self, weight: str) -> list[str]:
        """Return the name of a weight, and those that are tied to it."""
        return [weight, *self._tied.get(weight, ())]

    @cached_property
    def _tied(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, weight in self.layout.tied.items():
            found.setdefault(weight, []).append(name)
        return found

    def digests(self, shares: Mapping[str, int]) -> dict[str, int]:
        """Return the digest of each name, from the sum of its shares over all ranks."""
        return {
            name: signed(shares[weight.name]) + count(whole(weight.shape))
            for weight in self.layout.weights.values()
            for name in self.names_of(weight.name)
        }

    def with_tied(self, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight, and directly after it the names that are tied to it."""
        return ((name, tensor) for weight, tensor in stream for name in self.names_of(weight))


def describe(engine: TrainEngine, part: WeightPart) -> SourceWeights:
    """Return what all ranks of a training engine have of a part of its weights.

    Waits for: the other ranks. It goes through the weights once, without copying them.

    Raises:
        WorkerError: a name occurs twice, or ranks have weights of other shapes or dtypes.
    """
    gathered = gather_over_ranks((list(_own(engine.shard_stream(part))), socket.gethostname()))
    weights: dict[str, Weight] = {}
    dtypes: dict[str, torch.dtype] = {}
    tied: dict[str, str] = {}
    ranks: dict[int, tuple[StoredTensor, ...]] = {}
    for number, (found, _) in enumerate(gathered):
        tied |= {own.name: own.tied_to for own in found if own.tied_to}
        held = [own for own in found if not own.tied_to]
        for own in held:
            weight = Weight(own.name, own.shape, own.dtype.itemsize)
            if weights.setdefault(own.name, weight) != weight:
                raise WorkerError(
                    f"weight {own.name!r} has shape {own.shape} on rank {number} of the training "
                    f"engine and {weights[own.name].shape} on another rank",
                    tensor=own.name,
                    rank=number,
                )
            dtypes[own.name] = own.dtype
        ranks[number] = tuple(stored_box(own.name, own.box) for own in held)
    nodes = {number: node for number, (_, node) in enumerate(gathered)}
    return SourceWeights(Layout(weights, ranks, tied), dtypes, nodes)


@dataclass(frozen=True)
class _Own:
    """A weight as one rank has it: `box` of a weight of this shape; or the name of its weight."""

    name: str
    tied_to: str = ""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    box: Box = ()


def _own(weights: OwnWeights) -> Iterator[_Own]:
    seen: set[str] = set()
    last_name, last = "", None
    with closing(weights) as stream:
        for name, tensor in stream:
            _check_once(name, seen)
            if tensor is last:
                yield _Own(name, tied_to=last_name)
                continue
            last_name, last = name, tensor
            block = block_of(tensor, rank())
            spans = zip(block.offset, block.data.shape, strict=True)
            box = tuple((start, start + size) for start, size in spans)
            yield _Own(name, "", block.shape, block.data.dtype, box)


class SourceReader:
    """Reads the weights of this rank in order, and adds up their digests.

    One tensor is held at a time. Going to the next one can be a collective of the engine, so every
    rank must go to every weight.

    Args:
        stream: `shard_stream` of the engine.
        weights: of all ranks, in the dtypes in which they are sent.
        rank: this rank in the layout.
    """

    def __init__(self, stream: OwnWeights, weights: SourceWeights, rank: int) -> None:
        self._stream, self._weights = stream, weights
        self._boxes: dict[str, list[tuple[Box, Slot]]] = {}
        for name, box, slot in canonical_boxes(weights.layout)[rank]:
            self._boxes.setdefault(name, []).append((box, slot))
        self._seen: set[str] = set()
        self._name, self._tensor = "", torch.empty(0)
        self.shares = dict.fromkeys(weights.layout.weights, 0)
        """Weight → this rank's share of its digest, modulo 2^64."""

    def advance(self, weight: str) -> None:
        """Go to a weight. Every rank goes to every weight, in the order of the plan."""
        while weight != self._name:
            if not self._next():
                raise WorkerError(
                    f"the training engine did not yield weight {weight!r}, which it had before",
                    tensor=weight,
                    tensors=(weight,),
                )

    def tensor(self, name: str) -> Tensor:
        """Return what this rank has of the weight."""
        assert name == self._name, (name, self._name)
        return self._tensor

    def finish(self) -> None:
        """Read what no transfer needed, for the digests."""
        while self._next():
            pass

    def _next(self) -> bool:
        """Go to the next weight; return False at the end."""
        for name, tensor in self._stream:
            _check_once(name, self._seen)
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


def _check_once(name: str, seen: set[str]) -> None:
    if name in seen:
        raise WorkerError(
            f"the training engine yielded weight {name!r} twice", tensor=name, tensors=(name,)
        )
    seen.add(name)
