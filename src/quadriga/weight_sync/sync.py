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
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from quadriga.checkpoint.shards import block_of
from quadriga.config.schema import WeightTransport
from quadriga.engines.base import LOG_PROBS, OwnWeights, TrainEngine, WeightPart
from quadriga.errors import WorkerError
from quadriga.models.adapters import is_stored_part
from quadriga.parallel.distributed import gather_over_ranks, local_device, rank, world_size
from quadriga.parallel.layouts import (
    Box,
    Layout,
    StoredTensor,
    Weight,
    count,
    replicated_layout,
    slices,
    split,
    stored_box,
    whole,
)
from quadriga.protocol import fields
from quadriga.rollout.abilities import RolloutAbilities
from quadriga.rollout.base import RolloutEngine, UpdateForm, integer_bits
from quadriga.rollout.guard import GuardedRollout
from quadriga.weight_sync.plan import NAMED_TENSORS, Plan, Slot, canonical_boxes, plan
from quadriga.weight_sync.transport import (
    CollectiveChannel,
    SharedMemoryChannel,
    Traffic,
    Transport,
    shares_memory,
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

_CHUNK = 1 << 18
"""Elements whose digest is computed at once: 8 bytes each for bits and index, on the device."""
_STOPS = "The run stops, because its samples would come from other weights than the trained ones"


# What the ranks of a training engine hold, and how their weights are read


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


class _Own(NamedTuple):
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


# Digests


def box_digest(values: Tensor, box: Box, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the share of a box in the digest of its weight, modulo 2^64.

    Args:
        values: the elements of the box.
        box: where they are in the weight.
        shape: of the weight.
        dtype: the values are rounded to it first, as the rollout engine holds them.
    """
    # Row 1, columns 1 and 2 of a 2 × 3 weight have the flat indices 4 and 5, so their share is
    # bits[4] · 9 + bits[5] · 11.
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    inner = tuple((0, stop - start) for start, stop in box)
    for part in split(inner, _CHUNK) if count(box) else ():
        # `reshape` copies what is not contiguous; one chunk at a time.
        flat = values[slices(part)].detach().to(dtype).reshape(-1)
        bits = integer_bits(flat)
        index = torch.zeros((), dtype=torch.int64, device=values.device)
        for (start, stop), (base, _), size in zip(part, box, shape, strict=True):
            own = torch.arange(base + start, base + stop, device=values.device)
            index = (index[..., None] * size) + own
        total += (bits * (2 * index.reshape(-1) + 1)).sum()
    return int(total) % 2**64


def signed(value: int) -> int:
    """Return the 64-bit integer with these bits: from -2^63. Sums of them wrap around."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


def compare_digests(sent: Mapping[str, int], held: Mapping[str, int], version: int) -> None:
    """Check that the rollout engine holds what the training engine has.

    Raises:
        WorkerError: a weight was not sent, is not held, or differs. Names all such weights, at most
            `NAMED_TENSORS` of them. Attributes: `tensor` (the first one), `tensors`, `version`.
    """
    # sent  a:1  b:2       d:4
    # held  a:1  b:7  c:3         b differs, c was never sent, d is not held
    problems = dict(_problems(sent, held))
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


def _problems(sent: Mapping[str, int], held: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    for name in [*held, *(name for name in sent if name not in held)]:
        if name not in sent:
            yield name, "was never sent, so the rollout still holds an old value"
        elif name not in held:
            yield name, "was sent, but the rollout does not hold it"
        elif sent[name] != held[name]:
            yield name, "differs between trainer and rollout"


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

    def update(
        self, stream: Iterable[tuple[str, Tensor]], version: int, form: UpdateForm = "whole"
    ) -> None:
        """Copy new weights."""
        self.engine.update_weights(stream, version, form)

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
        target: RolloutEngine,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        transport: WeightTransport = "auto",
        device: str | torch.device = "cpu",
        in_place: bool = False,
    ) -> None:
        self._source = Source(source)
        self._verified = VerifiedTarget(target)
        self._target = self._verified.engine
        self._bucket_bytes, self._transport = bucket_bytes, transport
        self._device = local_device(device)
        self._in_place = in_place
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
        weights = self._source.weights(needs)
        current = self._planned(weights)
        self._verified.begin(version)
        with (
            self._source.reader(needs, weights) as reader,
            self._channel(current, weights) as channel,
        ):
            transport = Transport(current, rank(), reader, channel, weights.dtypes, self._device)
            received = weights.with_tied(transport.run(self._bucket_bytes))
            form: UpdateForm = "parts" if self._boxes else "whole"
            # Without transfers between ranks, what is received are the tensors of the source.
            if self._in_place and self._target.shares_weights and not current.link_bytes:
                form = "shared"
            self._verified.update(received, version, form)
        sent = weights.digests(self._sum_over_ranks(reader.shares))
        scores = trained_scores(self._source.engine, needs.probe, version)
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
