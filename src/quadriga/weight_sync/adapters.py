"""Adapters that a rollout engine computes beside its weights, so that only they are sent.

    part         what is sent                         when
    merged       W + B A of every layer               the engine holds no adapters
    unmerged     W of every layer, then A and B       first sync, if the engine holds adapters
    adapters     A and B                              every later sync

The names of A and B are those of an adapter's file; B is multiplied by the scaling. An engine that
holds adapters lists these names in `weight_dtypes` and `weights_digest`, for all layers that can
have one. Plan, transport and comparison treat A and B as weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from quadriga.engines.base import Batch, Outputs
from quadriga.errors import WorkerError
from quadriga.models.adapters.lora import is_stored_part

SourceT = TypeVar("SourceT")
WeightPart = Literal["merged", "unmerged", "adapters"]
"""What one weight sync sends; see the module."""


@runtime_checkable
class AdapterSource(Protocol):
    """A training engine with adapters."""

    def unmerged_stream(self, *, base: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield A and B of every adapter; before them, if `base`, the weights of the base model."""
        ...

    def forward(self, batch: Batch, *, temperature: float = 1.0) -> Outputs:
        """Compute log-probabilities, with the adapters."""
        ...


@dataclass(frozen=True)
class UnmergedSource:
    """A training engine as the source of its adapters, with or without the base model."""

    engine: AdapterSource
    base: bool

    def shard_stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what this rank has; see `ShardedSource`."""
        return self.engine.unmerged_stream(base=self.base)

    def forward(self, batch: Batch, *, temperature: float = 1.0) -> Outputs:
        """Compute the log-probabilities that the probe compares."""
        return self.engine.forward(batch, temperature=temperature)


def part_for(dtypes: Mapping[str, object], *, holds_base: bool) -> WeightPart:
    """Return what a rollout engine with these names in `weight_dtypes` must be sent.

    `holds_base`: a sync has given it the base model before.
    """
    if not any(map(is_stored_part, dtypes)):
        return "merged"
    return "adapters" if holds_base else "unmerged"


def source_of(engine: SourceT, part: WeightPart) -> SourceT | UnmergedSource:
    """Return what yields a part of the weights of a training engine.

    Raises:
        WorkerError: the training engine has no adapters to send.
    """
    if part == "merged":
        return engine
    if not isinstance(engine, AdapterSource):
        raise WorkerError(
            f"the rollout engine holds adapters, but the training engine {type(engine).__name__} "
            "cannot send them; set rollout.load_adapters=false"
        )
    return UnmergedSource(engine, base=part == "unmerged")


def held_of_part(sent: Mapping[str, int], held: Mapping[str, int]) -> dict[str, int]:
    """Return the digests of a rollout engine that a sync must compare with those it has sent.

    An engine holds zeros for layers without an adapter, which are not sent. Of a sync of adapters
    alone the base model is not compared, because nothing has been written to it.
    """
    adapters_only = all(map(is_stored_part, sent))
    return {
        name: digest
        for name, digest in held.items()
        if name in sent or not (adapters_only or is_stored_part(name))
    }
