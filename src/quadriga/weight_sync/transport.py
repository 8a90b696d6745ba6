"""Read the weights of a training engine for what a rollout engine needs, and execute a plan.

A rank copies what it has, sends what others need, and receives what it lacks.

consumes      the rank's weights, in the order of the plan, and a group with the other ranks
produces      the rank's target tensors, each as soon as it is complete
waits for     the other ranks of the group, which must execute the same plan
memory        two rounds of the plan, at most `bucket_bytes`, and the tensors that are not complete,
              which are of two rounds at most

A round is packed, sent and received by an all-to-all of a process group, gloo or NCCL: of one
worker group, or of two that have joined a common group. The next round is packed and sent before
the last one is received, so that packing and sending overlap. Every rank sends every round of the
plan, in order.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from quadriga.checkpoint.shards import Block, block_of
from quadriga.engines.base import LOG_PROBS, OwnWeights, TrainEngine, WeightPart
from quadriga.parallel.distributed import Collectives, gather_over_ranks, rank
from quadriga.parallel.layouts import (
    Box,
    Layout,
    StoredTensor,
    Weight,
    count,
    intersection,
    moved,
    shape_of,
    slices,
    split,
    stored_box,
    whole,
)
from quadriga.protocol import fields
from quadriga.rollout.abilities import RolloutAbilities
from quadriga.rollout.base import RolloutEngine, integer_bits
from quadriga.rollout.guard import GuardedRollout, probe_ids
from quadriga.weight_sync.plan import (
    Plan,
    Round,
    Slot,
    Transfer,
    canonical_boxes,
    listed_names,
    plan,
    wrong_weights,
)

if TYPE_CHECKING:
    from quadriga.models.weights import FilePart

_ALIGNMENT = 16
_CHUNK = 1 << 18
"""Elements whose digest is computed at once: 8 bytes each for bits and index, on the device."""


# What the ranks of a training engine hold, and how their weights are read


@dataclass(frozen=True)
class SourceWeights:
    """The weights of a training engine over all of its ranks.

    Attributes:
        layout: where each rank has them. The tensors are named as the weights.
        nodes: rank → node.
    """

    layout: Layout
    nodes: Mapping[int, str]

    def sent_as(self, held: Mapping[str, torch.dtype]) -> SourceWeights:
        """Return the weights in the dtypes in which the rollout engine holds them."""
        weights = {
            name: replace(weight, dtype=held.get(name, weight.dtype))
            for name, weight in self.layout.weights.items()
        }
        return SourceWeights(replace(self.layout, weights=weights), self.nodes)

    def names_of(self, weight: str) -> list[str]:
        """Return the name of a weight, and those that are tied to it."""
        return [weight, *(name for name, first in self.layout.tied.items() if first == weight)]

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


@dataclass(frozen=True)
class WeightNeeds:
    """What the sender must know of a rollout engine.

    Attributes:
        dtypes: the dtype in which it holds each weight.
        probe: its abilities, if it exposes no weights and is compared by scores.
        node: of the rank.
        part: what it must be sent.
        as_files: its weights have the names and shapes of the model's files.
    """

    dtypes: Mapping[str, torch.dtype]
    probe: RolloutAbilities | None
    node: str
    part: WeightPart = "merged"
    as_files: bool = False


def needs_of(target: RolloutEngine) -> WeightNeeds:
    """Return the needs of a rollout engine.

    One that holds adapters needs only these, if a sync has given it the base model before.
    """
    abilities, dtypes = target.abilities, target.weight_dtypes()
    part: WeightPart = "merged"
    if target.holds_adapters:
        synced = isinstance(target, GuardedRollout) and target.synced
        part = "adapters" if synced and not target.lacks_weights() else "unmerged"
    probe = None if abilities.exposes_weights else abilities
    return WeightNeeds(dtypes, probe, socket.gethostname(), part, abilities.file_names)


def named_as_files(
    stream: OwnWeights, parts: Mapping[str, Sequence[FilePart]], rank: int
) -> OwnWeights:
    """Yield what this rank has of each tensor of a model's files. Nothing is gathered or copied.

    Two experts of a layer in one parameter, whose first row is on rank 0 and second on rank 1:

        yielded [2, 6, D]    0.gate_proj [3, D]    0.up_proj [3, D]    1.gate_proj   1.up_proj
        on rank 0            [0, 0:3]              [0, 3:6]            empty         empty
        on rank 1            empty                 empty               [1, 0:3]      [1, 3:6]
    """
    with closing(stream):
        for name, tensor in stream:
            own = parts.get(name)
            if own is None or (len(own) == 1 and own[0].shape == tuple(tensor.shape)):
                yield name if own is None else own[0].name, tensor
                continue
            block = block_of(tensor, rank)
            spans = zip(block.offset, block.data.shape, strict=True)
            held = tuple((start, start + size) for start, size in spans)
            for part in own:
                yield part.name, _block_of_part(part, block, held)


def _block_of_part(part: FilePart, block: Block, held: Box) -> Block:
    box = intersection(part.box, held)
    if box is None:
        nothing = block.data.new_empty(0, *part.shape[1:])
        return Block(nothing, part.shape, (0,) * len(part.shape), block.is_first_copy)
    values = block.data[slices(moved(box, held, whole(tuple(block.data.shape))))]
    others = [dim for dim in range(len(box)) if dim not in part.dims]
    offset = tuple(box[dim][0] - part.box[dim][0] for dim in part.dims)
    return Block(values.squeeze(others), part.shape, offset, block.is_first_copy)


def describe(stream: OwnWeights) -> SourceWeights:
    """Return what all ranks of a training engine have of the weights that they yield.

    Waits for: the other ranks. It goes through the weights once, without copying them.

    Raises:
        WorkerError: a name occurs twice, or ranks have weights of other shapes or dtypes.
    """
    own: dict[str, Weight] = {}
    own_tied: dict[str, str] = {}
    stored = []
    seen: set[str] = set()
    last_name, last = "", None
    with closing(stream):
        for name, tensor in stream:
            _check_once(name, seen)
            if tensor is last:
                own_tied[name] = last_name
                continue
            last_name, last = name, tensor
            block = block_of(tensor, rank())
            spans = zip(block.offset, block.data.shape, strict=True)
            stored.append(stored_box(name, tuple((start, start + size) for start, size in spans)))
            own[name] = Weight(name, block.shape, block.data.dtype)
    weights: dict[str, Weight] = {}
    tied: dict[str, str] = {}
    ranks: dict[int, tuple[StoredTensor, ...]] = {}
    nodes: dict[int, str] = {}
    told = own, own_tied, tuple(stored), socket.gethostname()
    for number, (found, found_tied, held, node) in enumerate(gather_over_ranks(told)):
        ranks[number], nodes[number] = held, node
        tied |= found_tied
        for weight in found.values():
            if weights.setdefault(weight.name, weight) != weight:
                raise wrong_weights(
                    f"weight {weight.name!r} has shape {weight.shape} on rank {number} of the "
                    f"training engine and {weights[weight.name].shape} on another rank",
                    weight.name,
                )
    return SourceWeights(Layout(weights, ranks, tied), nodes)


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
        self._stream, self._weights, self._rank = stream, weights, rank
        self._boxes: dict[str, list[tuple[Box, Slot]]] = {}
        for name, box, slot in canonical_boxes(weights.layout)[rank]:
            self._boxes.setdefault(name, []).append((box, slot))
        self._seen: set[str] = set()
        self._name, self._tensor = "", torch.empty(0)  # the weight, and what this rank has of it
        self.shares = dict.fromkeys(weights.layout.weights, 0)
        """Weight → this rank's share of its digest, modulo 2^64."""

    def parts(self, current: Round) -> Iterator[tuple[Transfer, Tensor]]:
        """Yield each transfer of a round that this rank sends, and its values."""
        for transfer in current.transfers:
            # On every rank and in the order of the plan: reading can be a collective.
            self._advance(transfer.weight)
            if transfer.source == self._rank:
                yield transfer, self._tensor[slices(transfer.read.box)]

    def _advance(self, weight: str) -> None:
        while weight != self._name:
            if not self._next():
                problem = f"did not yield weight {weight!r}, which it had before"
                raise wrong_weights(f"the training engine {problem}", weight)

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
                problem = f"yielded weight {name!r}, which it did not have before"
                raise wrong_weights(f"the training engine {problem}", name)
            data = tensor.data  # of a tensor, or of a block
            self._name, self._tensor = name, data.to_local() if isinstance(data, DTensor) else data
            weight = self._weights.layout.weights[name]
            for box, slot in self._boxes.get(name, ()):
                values = self._tensor[slices(slot.box)]
                self.shares[name] += box_digest(values, box, weight)
            return True
        return False


class Source:
    """A training engine whose weights are sent. What its ranks hold is described once."""

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine
        self._described: dict[tuple[WeightPart, bool], SourceWeights] = {}

    def weights(self, needs: WeightNeeds) -> SourceWeights:
        """Return what is sent to a rollout engine with these needs. All ranks call this."""
        key = needs.part, needs.as_files
        if key not in self._described:
            self._described[key] = describe(self._stream(needs))
        return self._described[key].sent_as(needs.dtypes)

    def _stream(self, needs: WeightNeeds) -> OwnWeights:
        stream = self.engine.shard_stream(needs.part)
        return named_as_files(stream, self._parts, rank()) if needs.as_files else stream

    @cached_property
    def _parts(self) -> Mapping[str, Sequence[FilePart]]:
        from quadriga.models.loading import model_without_weights  # which imports transformers
        from quadriga.models.weights import file_parts

        return file_parts(model_without_weights(self.engine.model_config))

    @contextmanager
    def reader(self, needs: WeightNeeds, weights: SourceWeights) -> Iterator[SourceReader]:
        """Yield a reader of `weights` on this rank."""
        with closing(self._stream(needs)) as stream:
            yield SourceReader(stream, weights, rank())


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
    batch = {fields.INPUT_IDS: ids, fields.ATTENTION_MASK: ones, fields.RESPONSE_MASK: ones[:, 1:]}
    return engine.forward(batch, temperature=1.0)[LOG_PROBS]


def plan_to(
    boxes: Mapping[int, Mapping[str, Box]], weights: SourceWeights, last: Plan | None
) -> Plan:
    """Return the plan to ranks that hold these boxes, and all other weights whole.

    Args:
        last: the plan before. It is right as long as the weights are sent in the same dtypes.
    """
    known = weights.layout.weights
    if last is not None and last.source.weights == known:
        return last
    ranks = {
        number: tuple(
            stored_box(name, own.get(name, whole(weight.shape))) for name, weight in known.items()
        )
        for number, own in boxes.items()
    }
    return plan(weights.layout, Layout(known, ranks, weights.layout.tied), weights.nodes)


def _check_once(name: str, seen: set[str]) -> None:
    if name in seen:
        raise wrong_weights(f"the training engine yielded weight {name!r} twice", name)
    seen.add(name)


def box_digest(values: Tensor, box: Box, weight: Weight) -> int:
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
        flat = values[slices(part)].detach().to(weight.dtype).reshape(-1)
        bits = integer_bits(flat)
        index = torch.zeros((), dtype=torch.int64, device=values.device)
        for (start, stop), (base, _), size in zip(part, box, weight.shape, strict=True):
            own = torch.arange(base + start, base + stop, device=values.device)
            index = (index[..., None] * size) + own
        total += (bits * (2 * index.reshape(-1) + 1)).sum()
    return int(total) % 2**64


def signed(value: int) -> int:
    """Return the 64-bit integer with these bits: from -2^63. Sums of them wrap around."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


# One round between processes


class _Exchange:
    """One all-to-all. In the buffer, first what is sent, then what is received; in both, all boxes
    to or from one rank are together, in the order of the plan."""

    # Rank 0 of 3 sends a (8 bytes) to rank 2, b (4) to rank 1, c (8) to rank 2, and receives 16:
    #
    #   plan order   a→2  b→1  c→2
    #   buffer       b:0  a:4  c:12  received: 32 to 48     sizes per rank 0 4 16

    def __init__(
        self, group: Collectives, current: Round, buffer: Tensor, weights: Mapping[str, Weight]
    ) -> None:
        self.group, self.weights = group, weights
        own, ranks = group.rank(), group.size()
        remote = [t for t in current.transfers if not t.is_local]
        self.incoming = sorted((t for t in remote if t.target == own), key=lambda t: t.source)
        self.sizes_out, self.sizes_in = [0] * ranks, [0] * ranks
        for transfer in remote:
            if transfer.source == own:
                self.sizes_out[transfer.target] += transfer.num_bytes
            elif transfer.target == own:
                self.sizes_in[transfer.source] += transfer.num_bytes
        self.next = list(accumulate([0, *self.sizes_out[:-1]]))
        outgoing = sum(self.sizes_out)
        self.sent = buffer[:outgoing]
        start = -(-outgoing // _ALIGNMENT) * _ALIGNMENT
        self.received = buffer[start : start + sum(self.sizes_in)]

    def put(self, transfer: Transfer, values: Tensor) -> None:
        """Pack the box of a transfer of this rank. Transfers come in the order of the plan."""
        start = self.next[transfer.target]
        self.next[transfer.target] = stop = start + transfer.num_bytes
        copy_bytes(self.sent[start:stop], values)

    def send(self) -> None:
        """Send the round."""
        self.work = self.group.alltoall_base(
            self.received, self.sent, self.sizes_in, self.sizes_out
        )

    def receive(self) -> Iterator[tuple[Transfer, Tensor]]:
        """Yield what this rank receives; each tensor is valid until the next one is asked for.

        Waits for: the ranks that send. Unblocked by: their data, or the timeout of the group.
        """
        self.work.wait()
        start = 0
        for transfer in self.incoming:
            stop = start + transfer.num_bytes
            yield transfer, typed(self.received[start:stop], self.weights[transfer.weight].dtype)
            start = stop


def copy_bytes(into: Tensor, values: Tensor) -> None:
    """Copy the elements of a tensor in order into a flat tensor of bytes."""
    if into.storage_offset() % values.element_size():
        # `contiguous` would keep the strides of a single element.
        into.copy_(values.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8))
    else:  # without a copy of what is not contiguous
        into.view(values.dtype).view(values.shape).copy_(values)


def typed(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as a flat tensor of another dtype."""
    if flat.storage_offset() % dtype.itemsize:
        flat = flat.clone()  # a weight of 1-byte elements was packed before it
    return flat.view(dtype)


class Assembly:
    """Tensors that are put together from boxes. Elements that were sent twice are an error."""

    def __init__(self, device: torch.device) -> None:
        self.missing: dict[str, int] = {}
        """Name → elements that are not written yet, until the tensor is complete."""
        self._device = device
        self._made: dict[str, Tensor] = {}

    def write(
        self,
        name: str,
        box: Box,
        values: Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        lasting: bool = False,
    ) -> Tensor | None:
        """Write a box of a tensor. Return the tensor if that completes it. Padding is zero.

        Args:
            lasting: the memory of the values is not used again, so those of a whole tensor are
                passed on without a copy if they have its dtype and device.

        Raises:
            WorkerError: elements were sent twice. Attributes: `tensor`, `tensors`.
        """
        left = self.missing.get(name, 0) - count(box)
        if left < 0:
            raise wrong_weights(f"box {box} of weight {name!r} was sent twice", name)
        self.missing[name] = left
        if lasting and name not in self._made and tuple(values.shape) == tuple(shape):
            self._made[name] = values.to(self._device, dtype)
        else:
            if name not in self._made:
                self._made[name] = torch.zeros(tuple(shape), dtype=dtype, device=self._device)
            self._made[name][slices(box)] = values
        if left:
            return None
        del self.missing[name]
        return self._made.pop(name)


@dataclass
class Transport:
    """One rank's part of one weight sync.

    Args:
        plan: the plan, the same on all ranks.
        rank: this rank.
        read: gives the rank's own weights; None: it only receives.
        group: rank r of the plan is rank r of it; None: no transfers between processes.
        device: of the tensors that are made, and of the buffers of the group: the CPU for gloo,
            the accelerator for NCCL.
        moved: the bytes that the rank takes are added here, as in `GuardedRollout.moved`.
    """

    plan: Plan
    rank: int
    read: SourceReader | None
    group: Collectives | None
    device: torch.device
    moved: Counter[str] = field(default_factory=Counter)

    def run(self, bucket_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """Execute the plan; yield (name, tensor) of each target tensor when it is complete.

        Raises:
            WorkerError: elements of a tensor were not received, or were received twice.
        """
        tensors, self._weights = self.plan.target.ranks.get(self.rank, ()), self.plan.target.weights
        self._shapes = {tensor.name: tensor.shape for tensor in tensors}
        self._assembly = Assembly(self.device)
        for tensor in tensors:
            elements = sum(count(piece.box) for piece in tensor.pieces)
            if elements:
                self._assembly.missing[tensor.name] = elements
            else:  # no transfer completes it
                dtype = self._weights[tensor.name].dtype
                yield tensor.name, torch.zeros(tensor.shape, dtype=dtype, device=self.device)
        rounds = list(self.plan.rounds(bucket_bytes))
        size = max((r.staged.get(self.rank, 0) for r in rounds), default=0) + _ALIGNMENT
        # Two buffers take turns, so that no round allocates memory.
        buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        before = outgoing = None
        for number, current in enumerate(rounds):
            if self.group is not None:
                outgoing = _Exchange(self.group, current, buffers[number % 2], self._weights)
            yield from self._pack(current, outgoing)
            if outgoing is not None:
                outgoing.send()
            yield from self._receive(before)
            before = outgoing
        yield from self._receive(before)
        if self.read is not None:
            self.read.finish()
        if missing := list(self._assembly.missing):
            lacks = f"rank {self.rank} lacks elements of {listed_names(missing)}"
            raise wrong_weights(f"{lacks} at the end of the weight sync", *missing)

    def _pack(self, current: Round, outgoing: _Exchange | None) -> Iterator[tuple[str, Tensor]]:
        """Pack what this rank sends; yield what it completes with its own weights."""
        for transfer, values in () if self.read is None else self.read.parts(current):
            if transfer.is_local:
                self.moved["local"] += transfer.num_bytes
                yield from self._write(transfer, values)
            else:
                assert outgoing is not None, "a transfer between processes needs a group"
                outgoing.put(transfer, values.to(self._weights[transfer.weight].dtype))

    def _receive(self, sent: _Exchange | None) -> Iterator[tuple[str, Tensor]]:
        for transfer, flat in sent.receive() if sent is not None else ():
            self.moved["group"] += transfer.num_bytes
            yield from self._write(transfer, flat.view(shape_of(transfer.box)))

    def _write(self, transfer: Transfer, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        name = transfer.write.tensor
        dtype = self._weights[transfer.weight].dtype
        shape, box = self._shapes[name], transfer.write.box
        done = self._assembly.write(name, box, values, shape, dtype, lasting=transfer.is_local)
        if done is not None:
            yield name, done
