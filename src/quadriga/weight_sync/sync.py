"""Copy the weights of a training engine to a rollout engine, and verify that all of them arrived.

consumes      the shards of the training engine, one weight at a time (all ranks take part)
produces      the rollout engine's weights under a new version
checks        the digest of each weight of the training engine against what the rollout holds

`rollout.base.tensor_digest` is a sum over elements, so the digests of boxes that together are a
weight add up to the digest of the weight, whichever ranks hold them. The sender's digest is
computed from its own shards and not from what was sent, so a box that was lost, doubled or put into
another place changes the result.

An engine whose weights cannot be read back (`abilities.exposes_weights` is False) has the digests
of what its processes were sent. After each sync, trainer and engine also compute the
log-probabilities of the same random tokens. Engines with the same weights agree up to rounding: in
float32 no score may differ by more than `EXACT_BOUND`. With fewer bits the bound of the mean is
`NOISE_FACTOR` times the mean before the first sync, when both usually hold the weights of the model
folder, and later that of the first sync; it is at most `ROUNDED_BOUND`. A weight whose change is
smaller than the rounding of the scores is not found by them alone.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from quadriga.engines.base import LOG_PROBS, TrainEngine, WeightPart
from quadriga.errors import WorkerError
from quadriga.models.adapters import is_stored_part
from quadriga.parallel.distributed import gather_over_ranks, local_device, rank, world_size
from quadriga.parallel.layouts import (
    Box,
    Layout,
    replicated_layout,
    stored_box,
    whole,
)
from quadriga.protocol import fields
from quadriga.rollout.abilities import RolloutAbilities
from quadriga.rollout.base import RolloutEngine, UpdateForm
from quadriga.rollout.guard import GuardedRollout
from quadriga.weight_sync.plan import NAMED_TENSORS, Plan, plan
from quadriga.weight_sync.transport import (
    CollectiveChannel,
    SourceReader,
    SourceWeights,
    Traffic,
    Transport,
    describe,
    signed,
)

DEFAULT_BUCKET_BYTES = 256 << 20
PROBE_ROWS, PROBE_TOKENS = 8, 32
EXACT_BOUND = 1e-3
"""Nats that no log-probability may differ by if the rollout engine computes in float32."""
ROUNDED_BOUND = 0.1
"""Nats that log-probabilities may differ by on average if it computes with fewer bits."""
NOISE_FACTOR = 2.0
"""How much more log-probabilities may differ on average than after the first sync."""
LEAST_NOISE = 1e-3
"""Nats: a mean difference in the first sync below this one counts as this one."""

_STOPS = "The run stops, because its samples would come from other weights than the trained ones"


# Digests


def compare_digests(sent: Mapping[str, int], held: Mapping[str, int], version: int) -> None:
    """Check that the rollout engine holds what the training engine has.

    Raises:
        WorkerError: a weight was not sent, is not held, or differs. Names all such weights, at most
            `NAMED_TENSORS` of them. Attributes: `tensor` (the first one), `tensors`, `version`.
    """
    # sent  a:1  b:2       d:4
    # held  a:1  b:7  c:3         b differs, c was never sent, d is not held
    problems: dict[str, str] = {}
    for name in [*held, *(name for name in sent if name not in held)]:
        if name not in sent:
            problems[name] = "was never sent, so the rollout still holds an old value"
        elif name not in held:
            problems[name] = "was sent, but the rollout does not hold it"
        elif sent[name] != held[name]:
            problems[name] = "differs between trainer and rollout"
    if not problems:
        return
    listed = [f"{name!r} {problem}" for name, problem in problems.items()]
    more = len(listed) - NAMED_TENSORS
    text = "; ".join(listed[:NAMED_TENSORS]) + (f"; and {more} more" if more > 0 else "")
    names = tuple(problems)
    raise WorkerError(
        f"weight sync to version {version}: {len(names)} of {len(set(sent) | set(held))} weights "
        f"are wrong: {text}. {_STOPS}",
        tensor=names[0],
        tensors=names,
        version=version,
    )


def _held_of_part(sent: Mapping[str, int], held: Mapping[str, int]) -> dict[str, int]:
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


# Scores


def probe_ids(abilities: RolloutAbilities, version: int) -> Tensor:
    """Return [`PROBE_ROWS`, T] int64: random tokens, others for each version, T ≤ the window."""
    columns = min(PROBE_TOKENS, abilities.window or PROBE_TOKENS)
    generator = torch.Generator().manual_seed(version)
    shape = (PROBE_ROWS, max(columns, 2))
    return torch.randint(abilities.vocabulary, shape, generator=generator)


def trained_scores(
    engine: TrainEngine, probe: RolloutAbilities | None, version: int
) -> Tensor | None:
    """Return the training engine's log-probability of each probe token but the first, [B, T - 1].

    None if the rollout engine needs no probe. Waits for: the other ranks of the engine.
    """
    if probe is None:
        return None
    ids = probe_ids(probe, version)
    ones = torch.ones_like(ids)
    batch = {
        fields.INPUT_IDS: ids,
        fields.ATTENTION_MASK: ones,
        fields.RESPONSE_MASK: ones[:, 1:],
    }
    return engine.forward(batch, temperature=1.0)[LOG_PROBS]


class VerifiedTarget:
    """Updates a rollout engine, and compares it with the training engine after each sync.

    From `begin` to the end of `compare` the engine generates nothing, so one with the weights of a
    sync that broke off, or that was refused, is not used.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine if isinstance(engine, GuardedRollout) else GuardedRollout(engine)
        self._noise: float | None = None  # mean difference of scores in the first sync
        self._before: tuple[int, Tensor] | None = None  # version and scores before that sync

    def begin(self, version: int) -> None:
        """Start a sync."""
        self.engine.begin_sync(version)
        first = self._noise is None and (self._before is None or self._before[0] != version)
        if first and not self.engine.abilities.exposes_weights:
            self._before = version, self._score(version)

    def compare(self, sent: Mapping[str, int], scores: Tensor | None, version: int) -> None:
        """Compare what the engine holds with what the training engine has, and end the sync.

        Args:
            sent: the digest of each weight of the training engine.
            scores: of the training engine for the probe tokens; None if the rollout engine exposes
                its weights.

        Raises:
            WorkerError: weights differ. Attributes: `tensor` and `tensors` where they are known,
                `version`.
        """
        if self.engine.abilities.exposes_weights:
            compare_digests(sent, _held_of_part(sent, self.engine.weights_digest()), version)
        else:
            compare_digests(sent, self.engine.received_digests(), version)
            assert scores is not None, "the needs of the engine ask for scores"
            self._compare_scores(scores, version)
        self.engine.end_sync()

    def _compare_scores(self, trained: Tensor, version: int) -> None:
        difference = (self._score(version) - trained).abs()
        exact = all(dtype.itemsize >= 4 for dtype in self.engine.weight_dtypes().values())
        found = float(difference.max() if exact else difference.mean())
        noise = self._noise
        if noise is None:
            assert self._before is not None, "`begin` comes first"
            noise = max(float((self._before[1] - trained).abs().mean()), LEAST_NOISE)
        bound = EXACT_BOUND if exact else min(ROUNDED_BOUND, NOISE_FACTOR * noise)
        if not found <= bound:  # NaN is no agreement
            kind = "at most" if exact else "on average"
            raise WorkerError(
                f"weight sync to version {version}: the log-probabilities of "
                f"{difference.numel()} probe tokens differ by {found:.3g} nats between trainer and "
                f"rollout, expected {kind} {bound:.3g}. {_STOPS}",
                version=version,
                difference=found,
            )
        if self._noise is None:
            self._noise = max(found, LEAST_NOISE)

    def _score(self, version: int) -> Tensor:
        ids = probe_ids(self.engine.abilities, version)
        return self.engine.score(ids, torch.ones_like(ids))[:, 1:]


# The sync of the engines of one process


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


def needs_of(target: RolloutEngine) -> WeightNeeds:
    """Return the needs of a rollout engine.

    One that holds adapters (their names are in its `weight_dtypes`) needs only these, if a sync has
    given it the base model before.
    """
    abilities, dtypes = target.abilities, target.weight_dtypes()
    part: WeightPart = "merged"
    if any(map(is_stored_part, dtypes)):
        synced = isinstance(target, GuardedRollout) and target.synced
        part = "adapters" if synced and not target.lacks_weights() else "unmerged"
    probe = None if abilities.exposes_weights else abilities
    return WeightNeeds(dtypes, probe, socket.gethostname(), part)


class Source:
    """A training engine whose weights are sent. What its ranks hold is described once."""

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine
        self._described: dict[WeightPart, SourceWeights] = {}

    def weights(self, needs: WeightNeeds) -> SourceWeights:
        """Return what is sent to a rollout engine with these needs. All ranks call this."""
        if needs.part not in self._described:
            self._described[needs.part] = describe(self.engine, needs.part)
        return self._described[needs.part].sent_as(needs.dtypes)

    @contextmanager
    def reader(self, needs: WeightNeeds, weights: SourceWeights) -> Iterator[SourceReader]:
        """Yield a reader of `weights` on this rank."""
        with closing(self.engine.shard_stream(needs.part)) as stream:
            yield SourceReader(stream, weights, rank())


class WeightSync:
    """Copies the weights of a training engine to the rollout engine of the same process.

    All ranks of a worker group have one, and run it together. The layout of the training engine and
    the plan are made at the first sync.

    Args:
        bucket_bytes: the memory for weights in flight, on each rank.
        device: of the weights that are put together for the rollout engine.
        in_place: the training engine keeps its tensors where they are, so a rollout engine that can
            uses them themselves if each rank has whole ones.
    """

    def __init__(
        self,
        source: TrainEngine,
        target: RolloutEngine,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        device: str | torch.device = "cpu",
        in_place: bool = False,
    ) -> None:
        self._source = Source(source)
        self._verified = VerifiedTarget(target)
        self._target = self._verified.engine
        self._bucket_bytes = bucket_bytes
        self._device = local_device(device)
        self._in_place = in_place
        self._plan: Plan | None = None
        self._boxes: dict[str, Box] = {}  # what this rank holds of weights that are divided

    def run(self, version: int) -> Traffic:
        """Copy every weight, then compare digests, and scores of probe tokens if the rollout engine
        does not expose its weights. Return what this rank did.

        If the target holds a weight in another dtype, the weight is rounded to that dtype before
        its digest is taken and before it is sent.

        Raises:
            WorkerError: weights were not received, or have other values. Names them. Attributes:
                `tensor` (the first one), `tensors`, `version`.
        """
        needs = needs_of(self._target)
        weights = self._source.weights(needs)
        current = self._planned(weights)
        self._verified.begin(version)
        channel = None
        if current.link_bytes:
            group = dist.group.WORLD
            assert group is not None
            rounds = current.rounds(self._bucket_bytes)
            channel = CollectiveChannel(group, self._device, rounds, weights.dtypes)
        with self._source.reader(needs, weights) as reader:
            transport = Transport(current, rank(), reader, channel, weights.dtypes, self._device)
            received = weights.with_tied(transport.run(self._bucket_bytes))
            form: UpdateForm = "parts" if self._boxes else "whole"
            # Without transfers between ranks, what is received are the tensors of the source.
            if self._in_place and self._target.engine.shares_weights and not current.link_bytes:
                form = "shared"
            self._target.update_weights(received, version, form)
        sent = weights.digests(self._sum_over_ranks(reader.shares))
        scores = trained_scores(self._source.engine, needs.probe, version)
        self._verified.compare(sent, scores, version)
        sizes = [w.num_bytes * len(weights.names_of(n)) for n, w in weights.layout.weights.items()]
        transport.traffic.num_bytes = sum(sizes)
        return transport.traffic

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
