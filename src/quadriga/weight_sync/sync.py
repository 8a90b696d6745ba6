"""Weights from a training engine to the rollout engines in the same processes.

consumes      the shards of the training engine, one weight at a time (all ranks take part)
produces      the rollout engine's weights under a new version
checks        the digest of each weight of the training engine against what the rollout holds
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from quadriga.config.schema import WeightTransport
from quadriga.errors import WorkerError
from quadriga.parallel.distributed import gather_over_ranks, local_device, rank
from quadriga.parallel.layouts import Box, Layout, replicated_layout, stored_box, whole
from quadriga.rollout.abilities import RolloutAbilities
from quadriga.rollout.base import HoldsShards, SharesWeights
from quadriga.weight_sync.adapters import WeightPart, part_for
from quadriga.weight_sync.channels import (
    Channel,
    CollectiveChannel,
    NoChannel,
    SharedMemoryChannel,
    shares_memory,
)
from quadriga.weight_sync.digests import whole_digests
from quadriga.weight_sync.planning.plan import Plan, plan
from quadriga.weight_sync.probe import ScoredSource, probe_ids, trained_scores
from quadriga.weight_sync.sources import (
    ShardedSource,
    SourceReader,
    SourceWeights,
    WeightSource,
    describe,
    own_weights,
)
from quadriga.weight_sync.transport import Traffic, Transport
from quadriga.weight_sync.verification import VerifiedTarget, WeightTarget

DEFAULT_BUCKET_BYTES = 256 << 20


@dataclass(frozen=True)
class WeightNeeds:
    """What the sender must know of a rollout engine.

    Attributes:
        dtypes: the dtype in which it holds each weight.
        probe: its abilities, if it exposes no weights and is compared by scores.
        node: of the rank.
        part: what it must be sent.
    """

    dtypes: Mapping[str, torch.dtype]
    probe: RolloutAbilities | None
    node: str
    part: WeightPart = "merged"


def needs_of(target: WeightTarget, *, holds_base: bool = False) -> WeightNeeds:
    """Return the needs of a rollout engine. `holds_base`: see `part_for`."""
    abilities, dtypes = target.abilities, target.weight_dtypes()
    probe = None if abilities.exposes_weights else abilities
    part = part_for(dtypes, holds_base=holds_base)
    return WeightNeeds(dtypes, probe, socket.gethostname(), part)


@dataclass(frozen=True)
class SyncReport:
    """One sync: version, number of tensors and bytes of all, and what this rank did."""

    version: int
    tensors: int
    num_bytes: int
    traffic: Traffic


class WeightSync:
    """Copies the weights of a training engine to the rollout engine of the same process.

    All ranks of a worker group have one, and run it together. The layout of the training engine and
    the plan are made at the first sync.

    Args:
        source: the training engine.
        target: the rollout engine.
        bucket_bytes: the memory for weights in flight, on each rank.
        transport: "shared_memory" needs ranks on one node with weights in host memory. "auto" takes
            it where possible, else a collective of the worker group's process group.
        device: of the weights that are put together for the rollout engine.
        in_place: the training engine keeps its tensors where they are, so a rollout engine that can
            (`SharesWeights`) uses them themselves if each rank has whole ones.
    """

    def __init__(
        self,
        source: WeightSource | ShardedSource,
        target: WeightTarget,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        transport: WeightTransport = "auto",
        device: str | torch.device = "cpu",
        in_place: bool = False,
    ) -> None:
        self._source, self._target = source, target
        self._verified = VerifiedTarget(target)
        self._bucket_bytes, self._transport = bucket_bytes, transport
        self._device = local_device(device)
        self._in_place = in_place
        self._described: SourceWeights | None = None
        self._plan: Plan | None = None
        self._boxes: Mapping[str, Box] = {}  # what this rank holds of weights that are divided

    def run(self, version: int) -> SyncReport:
        """Copy every weight, then compare digests, or scores of probe tokens if the rollout engine
        does not expose its weights.

        If the target holds a weight in another dtype, the weight is rounded to that dtype before
        its digest is taken and before it is sent.

        Raises:
            WorkerError: weights were not received, or have other values. Names them. Attributes:
                `tensor` (the first one), `tensors`, `version`.
        """
        target = self._target
        self._described = self._described or describe(self._source)
        weights = self._described.sent_as(target.weight_dtypes())
        current = self._planned(weights)
        self._verified.begin(version)
        with (
            closing(own_weights(self._source)) as stream,
            self._channel(current, weights) as channel,
        ):
            reader = SourceReader(stream, weights, rank())
            transport = Transport(current, rank(), reader, channel, weights.dtypes, self._device)
            received = with_tied(transport.run(self._bucket_bytes), weights)
            # Without transfers between ranks, what is received are the tensors of the source.
            in_place = self._in_place and not current.link_bytes
            if self._boxes and isinstance(target, HoldsShards):
                target.update_shards(received, version)
            elif (
                in_place and target.abilities.exposes_weights and isinstance(target, SharesWeights)
            ):
                target.share_weights(received, version)
            else:
                self._verified.update_weights(received, version)
        elements = {n: w.num_bytes // w.itemsize for n, w in weights.layout.weights.items()}
        digests = whole_digests(reader.shares, elements, self._device)
        sent = {name: digests[weight] for name, weight in weights.names()}
        self._verify(sent, version)
        sizes = {name: weight.num_bytes for name, weight in weights.layout.weights.items()}
        total = sum(sizes[weight] for _, weight in weights.names())
        return SyncReport(version, len(sent), total, transport.traffic)

    def _planned(self, weights: SourceWeights) -> Plan:
        """Return the plan; the old one while the weights are sent in the same dtypes."""
        if self._plan is None or self._plan.source.weights != weights.layout.weights:
            if isinstance(self._target, HoldsShards):
                self._boxes = self._target.weight_boxes()
            held = held_by_ranks(weights, gather_over_ranks(self._boxes))
            self._plan = plan(weights.layout, held, weights.nodes)
        return self._plan

    def _channel(self, current: Plan, weights: SourceWeights) -> AbstractContextManager[Channel]:
        if not current.link_bytes:
            return nullcontext(NoChannel())
        group = dist.group.WORLD
        assert group is not None
        nodes = list(weights.nodes.values())
        possible = shares_memory(nodes, self._device)
        if self._transport == "shared_memory" and not possible:
            raise WorkerError(
                "rollout.weight_transport=shared_memory needs Linux, ranks on one node and weights "
                f"in host memory; got the nodes {sorted(set(nodes))} and device {self._device}. "
                "Set rollout.weight_transport=auto"
            )
        rounds = current.rounds(self._bucket_bytes)
        if possible and self._transport != "collective":
            return SharedMemoryChannel(group, rounds, weights.dtypes)
        return nullcontext(CollectiveChannel(group, self._device, rounds, weights.dtypes))

    def _verify(self, sent: Mapping[str, int], version: int) -> None:
        probe = needs_of(self._target).probe
        scores = None if probe is None else scores_of(self._source, probe, version)
        self._verified.compare(sent, scores, version)


def held_by_ranks(weights: SourceWeights, boxes: Sequence[Mapping[str, Box]]) -> Layout:
    """Return the layout of a rollout of which each rank holds these boxes, and all other weights
    whole."""
    whole_weights = whole_on(weights, range(len(boxes)))
    ranks = {
        rank: tuple(
            stored_box(tensor.name, boxes[rank].get(tensor.name, whole(tensor.shape)))
            for tensor in tensors
        )
        for rank, tensors in whole_weights.ranks.items()
    }
    return Layout(whole_weights.weights, ranks, whole_weights.tied)


def whole_on(weights: SourceWeights, ranks: Iterable[int]) -> Layout:
    """Return the layout in which each of these ranks has every weight: what engines read."""
    return replicated_layout(weights.layout.weights.values(), ranks, weights.layout.tied)


def with_tied(
    stream: Iterator[tuple[str, Tensor]], weights: SourceWeights
) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight, and directly after it the names that are tied to it."""
    for weight, tensor in stream:
        for name in (weight, *weights.tied_to(weight)):
            yield name, tensor


def scores_of(
    source: WeightSource | ShardedSource, probe: RolloutAbilities, version: int
) -> Tensor:
    """Return the training engine's scores of the probe tokens of a version.

    Raises:
        WorkerError: the training engine computes no log-probabilities.
    """
    if not isinstance(source, ScoredSource):
        raise WorkerError(
            f"weight sync to version {version} cannot be verified: the rollout engine exposes no "
            "weights, and the training engine computes no log-probabilities",
            version=version,
        )
    return trained_scores(source, probe_ids(probe, version))
