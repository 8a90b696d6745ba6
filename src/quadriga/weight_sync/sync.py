"""Weights from a training engine to the rollout engines in the same processes.

consumes      the shards of the training engine, one weight at a time (all ranks take part)
produces      the rollout engine's weights under a new version
checks        the digest of each weight of the training engine against what the rollout holds
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from quadriga.config.schema import WeightTransport
from quadriga.engines.base import TrainEngine, WeightPart
from quadriga.errors import WorkerError
from quadriga.models.adapters import is_stored_part
from quadriga.parallel.distributed import gather_over_ranks, local_device, rank, world_size
from quadriga.parallel.layouts import Box, Layout, replicated_layout, stored_box, whole
from quadriga.rollout.abilities import RolloutAbilities
from quadriga.rollout.base import RolloutEngine
from quadriga.rollout.guard import GuardedRollout
from quadriga.weight_sync.plan import Plan, plan
from quadriga.weight_sync.sources import SourceReader, SourceWeights, describe
from quadriga.weight_sync.transport import (
    CollectiveChannel,
    SharedMemoryChannel,
    Traffic,
    Transport,
    shares_memory,
)
from quadriga.weight_sync.verification import VerifiedTarget, signed, trained_scores

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


def needs_of(target: RolloutEngine | GuardedRollout, *, holds_base: bool = False) -> WeightNeeds:
    """Return the needs of a rollout engine.

    `holds_base`: a sync has given it the base model before, so one that holds adapters (their names
    are in its `weight_dtypes`) needs only these.
    """
    abilities, dtypes = target.abilities, target.weight_dtypes()
    part: WeightPart = "merged"
    if any(map(is_stored_part, dtypes)):
        part = "adapters" if holds_base else "unmerged"
    probe = None if abilities.exposes_weights else abilities
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
        part: what is sent; see `TrainEngine.shard_stream`.
        bucket_bytes: the memory for weights in flight, on each rank.
        transport: "shared_memory" needs ranks on one node with weights in host memory. "auto" takes
            it where possible, else a collective of the worker group's process group.
        device: of the weights that are put together for the rollout engine.
        in_place: the training engine keeps its tensors where they are, so a rollout engine that can
            uses them themselves if each rank has whole ones.
    """

    def __init__(
        self,
        source: TrainEngine,
        target: RolloutEngine | GuardedRollout,
        part: WeightPart = "merged",
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        transport: WeightTransport = "auto",
        device: str | torch.device = "cpu",
        in_place: bool = False,
    ) -> None:
        self._source, self._part = source, part
        self._verified = VerifiedTarget(target)
        self._target = self._verified.engine
        self._bucket_bytes, self._transport = bucket_bytes, transport
        self._device = local_device(device)
        self._in_place = in_place
        self._described: SourceWeights | None = None
        self._plan: Plan | None = None
        self._boxes: dict[str, Box] = {}  # what this rank holds of weights that are divided

    def run(self, version: int) -> SyncReport:
        """Copy every weight, then compare digests, and scores of probe tokens if the rollout engine
        does not expose its weights.

        If the target holds a weight in another dtype, the weight is rounded to that dtype before
        its digest is taken and before it is sent.

        Raises:
            WorkerError: weights were not received, or have other values. Names them. Attributes:
                `tensor` (the first one), `tensors`, `version`.
        """
        needs = needs_of(self._target)
        self._described = self._described or describe(self._source, self._part)
        weights = self._described.sent_as(needs.dtypes)
        current = self._planned(weights)
        self._verified.begin(version)
        with (
            closing(self._source.shard_stream(self._part)) as stream,
            self._channel(current, weights) as channel,
        ):
            reader = SourceReader(stream, weights, rank())
            transport = Transport(current, rank(), reader, channel, weights.dtypes, self._device)
            received = weights.with_tied(transport.run(self._bucket_bytes))
            # Without transfers between ranks, what is received are the tensors of the source.
            if self._in_place and not current.link_bytes and needs.probe is None:
                self._target.share_weights(received, version)
            elif self._boxes:
                self._target.update_shards(received, version)
            else:
                self._verified.update(received, version)
        sent = weights.digests(self._sum_over_ranks(reader.shares))
        scores = trained_scores(self._source, needs.probe, version)
        self._verified.compare(sent, scores, version)
        sizes = [w.num_bytes * len(weights.names_of(n)) for n, w in weights.layout.weights.items()]
        return SyncReport(version, len(sent), sum(sizes), transport.traffic)

    def _sum_over_ranks(self, shares: Mapping[str, int]) -> dict[str, int]:
        """Return the sums over ranks, which wrap around as the digest does, in one collective."""
        totals = torch.tensor([signed(share) for share in shares.values()], device=self._device)
        if world_size() > 1:
            dist.all_reduce(totals)
        return dict(zip(shares, totals.tolist(), strict=True))

    def _planned(self, weights: SourceWeights) -> Plan:
        """Return the plan; the old one while the weights are sent in the same dtypes."""
        if self._plan is None or self._plan.source.weights != weights.layout.weights:
            self._boxes = dict(self._target.weight_boxes())
            held = held_by_ranks(weights, gather_over_ranks(self._boxes))
            self._plan = plan(weights.layout, held, weights.nodes)
        return self._plan

    def _channel(
        self, current: Plan, weights: SourceWeights
    ) -> AbstractContextManager[CollectiveChannel | SharedMemoryChannel | None]:
        if not current.link_bytes:
            return nullcontext()
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
            return closing(SharedMemoryChannel(group, rounds, weights.dtypes))
        return closing(CollectiveChannel(group, self._device, rounds, weights.dtypes))


def held_by_ranks(weights: SourceWeights, boxes: Iterable[Mapping[str, Box]]) -> Layout:
    """Return the layout of a rollout of which each rank holds these boxes, and all other weights
    whole."""
    known = weights.layout.weights
    ranks = {
        number: tuple(
            stored_box(name, own.get(name, whole(weight.shape))) for name, weight in known.items()
        )
        for number, own in enumerate(boxes)
    }
    return Layout(known, ranks, weights.layout.tied)


def whole_on(weights: SourceWeights, ranks: Iterable[int]) -> Layout:
    """Return the layout in which each of these ranks has every weight: what engines read."""
    return replicated_layout(weights.layout.weights.values(), ranks, weights.layout.tied)
