"""A small transformer in the layouts of several engines, and the execution of a plan on arrays."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st

from quadriga.parallel.layouts import (
    Degrees,
    Layout,
    Model,
    Stored,
    Weight,
    parallel_layout,
    slices,
    stored_box,
    whole,
)

HEADS, GROUPS, HEAD, HIDDEN, INNER, VOCAB, EXPERTS = 8, 4, 2, 10, 16, 21, 4


def by_name(weights):
    return {weight.name: weight for weight in weights}


def replicated_layout(weights, ranks):
    """The layout in which each rank has every weight, whole and under its own name."""
    known = by_name(weights)
    tensors = tuple(stored_box(weight.name, whole(weight.shape)) for weight in known.values())
    return Layout(known, dict.fromkeys(ranks, tensors))


def sharded(layout, shards):
    """The layout after FSDP2, which divides each tensor once more, as `torch.chunk` does."""

    def part(tensor, index):
        rows = tensor.shape[0] if tensor.shape else 0
        start, stop = (min(i * -(-rows // shards), rows) for i in (index, index + 1))
        return tensor.narrow(0, start, stop) if tensor.shape else tensor

    ranks = [
        tuple(part(t, index) for t in own)
        for own in layout.ranks.values()
        for index in range(shards)
    ]
    return replace(layout, ranks=dict(enumerate(ranks)))


def weights_of(layers, *, tied=False, experts=False, adapters=0):
    """The checkpoint weights of a transformer with grouped queries."""
    found = [Weight("embed", (VOCAB, HIDDEN))]
    for i in range(layers):
        found += [
            Weight(f"{i}.norm", (HIDDEN,)),
            Weight(f"{i}.q", (HEADS * HEAD, HIDDEN)),
            Weight(f"{i}.k", (GROUPS * HEAD, HIDDEN)),
            Weight(f"{i}.v", (GROUPS * HEAD, HIDDEN)),
            Weight(f"{i}.k_bias", (GROUPS * HEAD,)),
            Weight(f"{i}.o", (HIDDEN, HEADS * HEAD)),
            Weight(f"{i}.scale", ()),
        ]
        for part in [f"{i}.{e}" for e in range(EXPERTS)] if experts else [f"{i}"]:
            found += [
                Weight(f"{part}.gate", (INNER, HIDDEN), torch.bfloat16),
                Weight(f"{part}.up", (INNER, HIDDEN), torch.bfloat16),
                Weight(f"{part}.down", (HIDDEN, INNER), torch.bfloat16),
            ]
    found += [] if tied else [Weight("head", (VOCAB, HIDDEN))]
    for weight in [w for w in found if w.name.endswith((".q", ".o")) and adapters]:
        out_size, in_size = weight.shape
        found.append(Weight(f"{weight.name}.lora_A.weight", (adapters, in_size)))
        found.append(Weight(f"{weight.name}.lora_B.weight", (out_size, adapters)))
    return by_name(found)


def stored_by(kind, weights, layers, degrees, *, tied=False):
    """How an engine stores the weights: "plain", "megatron" (query groups) or "vllm" (parts)."""
    padded = -(-VOCAB // 16) * 16
    last = degrees.pipeline - 1
    found = [Stored("embed", ("embed",), 0, padded=padded, stage=0)]
    if tied and last:  # the last stage has the embedding too, for the output layer
        found.append(Stored("output", ("embed",), 0, padded=padded, stage=last))
    for i in range(layers):
        stage = i * degrees.pipeline // layers
        names = (f"{i}.q", f"{i}.k", f"{i}.v")
        found += [
            Stored(f"{i}.norm", (f"{i}.norm",), stage=stage),
            Stored(f"{i}.scale", (f"{i}.scale",), stage=stage),
            Stored(f"{i}.k_bias", (f"{i}.k_bias",), 0, stage=stage),
            Stored(f"{i}.o", (f"{i}.o",), 1, stage=stage),
        ]
        if kind == "plain":
            found += [Stored(name, (name,), 0, stage=stage) for name in names]
        else:
            groups = GROUPS if kind == "megatron" else 0
            found.append(Stored(f"{i}.qkv", names, 0, groups, stage=stage))
        experts = f"{i}.0.gate" in weights
        for e in range(EXPERTS) if experts else (None,):
            part = f"{i}" if e is None else f"{i}.{e}"
            gate_up = (f"{part}.gate", f"{part}.up")
            if kind == "plain":
                found += [Stored(n, (n,), 0, stage=stage, expert=e) for n in gate_up]
            else:
                found.append(Stored(f"{part}.gate_up", gate_up, 0, stage=stage, expert=e))
            found.append(Stored(f"{part}.down", (f"{part}.down",), 1, stage=stage, expert=e))
    if "head" in weights:
        found.append(Stored("head", ("head",), 0, padded=padded, stage=last))
    found += [
        Stored(name, (name,), stage=int(name.split(".")[0]) * degrees.pipeline // layers)
        for name in weights
        if "lora" in name
    ]
    return tuple(found)


@st.composite
def degrees(draw, layers, *, experts=False, world=16):
    tensor = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= world]))
    world //= tensor
    pipeline = draw(st.integers(1, min(layers, world)))
    world //= pipeline
    expert = draw(st.sampled_from([n for n in (1, 2, 4) if n <= world])) if experts else 1
    return Degrees(tensor, expert, draw(st.integers(1, world // expert)), pipeline)


@st.composite
def layouts(draw, weights, layers, tied, *, world=16):
    experts = "0.0.gate" in weights
    kind = draw(st.sampled_from(["replicated", "fsdp", "plain", "megatron", "vllm"]))
    if kind == "replicated":
        return replicated_layout(weights.values(), range(draw(st.integers(1, 4))))
    if kind == "fsdp":
        shards = draw(st.integers(1, 8))
        copies = replicated_layout(weights.values(), range(draw(st.integers(1, 16 // shards))))
        return sharded(copies, shards)
    found = draw(degrees(layers, experts=experts, world=world))
    if kind == "megatron" and found.tensor > GROUPS:
        found = replace(found, tensor=GROUPS)
    stored = stored_by(kind, weights, layers, found, tied=tied)
    layout = parallel_layout(Model(weights, stored), found)
    return sharded(layout, draw(st.integers(1, max(1, 16 // found.world_size))))


@st.composite
def pairs(draw):
    """A source and a target layout of one model; on the same processes, on others, or in part."""
    layers = draw(st.integers(1, 3))
    tied = draw(st.booleans())
    weights = weights_of(
        layers, tied=tied, experts=draw(st.booleans()), adapters=draw(st.sampled_from([0, 0, 3]))
    )
    source = draw(layouts(weights, layers, tied))
    target = draw(layouts(weights, layers, tied))
    offset = draw(st.sampled_from([0, 0, 1, len(source.ranks)]))
    return source, replace(target, ranks={r + offset: t for r, t in target.ranks.items()})


def values_of(layout):
    """Every element of every weight has a number of its own, from 1."""
    found, start = {}, 1
    for name, weight in layout.weights.items():
        size = int(np.prod(weight.shape))
        found[name] = np.arange(start, start + size, dtype=np.int64).reshape(weight.shape)
        start += size
    return found


def filled(layout: Layout, values):
    """Rank → name → array of every tensor of the layout; -1 is padding."""
    arrays = {}
    for rank, tensors in layout.ranks.items():
        arrays[rank] = {tensor.name: np.full(tensor.shape, -1) for tensor in tensors}
        for tensor in tensors:
            for piece in tensor.pieces:
                arrays[rank][tensor.name][slices(piece.at)] = values[piece.weight][
                    slices(piece.box)
                ]
    return arrays


class Ranks:
    """Executes a plan in rounds, as `Transport` does, and counts writes and bytes in buffers."""

    def __init__(self, plan):
        self.plan = plan
        self.source = filled(plan.source, values_of(plan.source))
        self.target = {
            rank: {tensor.name: np.full(tensor.shape, -1) for tensor in tensors}
            for rank, tensors in plan.target.ranks.items()
        }
        self.writes = {
            rank: {name: np.zeros_like(array) for name, array in arrays.items()}
            for rank, arrays in self.target.items()
        }
        self.peak = dict.fromkeys((*plan.source.ranks, *plan.target.ranks), 0)
        self.received = dict.fromkeys(self.peak, 0)

    def run(self, bucket_bytes):
        held, before = dict.fromkeys(self.peak, 0), []
        for current in self.plan.rounds(bucket_bytes):
            packed = []
            for t in current.transfers:
                values = self.source[t.source][t.read.tensor][slices(t.read.box)].copy()
                packed.append((t, values))
                if not t.is_local:
                    assert values.size * (t.num_bytes // max(values.size, 1)) == t.num_bytes
                    self._hold(held, t, t.num_bytes)
                    self.received[t.target] += t.num_bytes
            self._write(before, held)
            before = packed
        self._write(before, held)
        return self

    def _write(self, packed, held):
        for t, values in packed:
            self.target[t.target][t.write.tensor][slices(t.write.box)] = values
            self.writes[t.target][t.write.tensor][slices(t.write.box)] += 1
            if not t.is_local:
                self._hold(held, t, -t.num_bytes)

    def _hold(self, held, transfer, size):
        for rank in (transfer.source, transfer.target):
            held[rank] += size
            self.peak[rank] = max(self.peak[rank], held[rank])
