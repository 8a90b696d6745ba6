"""Layouts of training and rollout engines: replicated, FSDP, tensor, pipeline and expert parallel.

A `Stored` says how an engine stores one tensor: which weights it fuses, which dimension tensor
parallelism splits, on which pipeline stage it is, of which expert it is. `parallel_layout` builds
the layout of all ranks from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from quadriga.errors import ConfigError, ShapeError
from quadriga.parallel.layouts.boxes import Box
from quadriga.parallel.layouts.layout import (
    Layout,
    StoredTensor,
    Weight,
    by_name,
    concatenated,
    stored_whole,
)

Fusion = Literal["parts", "query groups"]
"""How a fused tensor is ordered on a rank. "parts": its shard of each weight, one after another
(gate and up; q, k and v in vLLM and SGLang). "query groups": for each group the rows of q, then of
k, then of v (Megatron-core)."""


@dataclass(frozen=True)
class Stored:
    """How an engine stores one tensor.

    Attributes:
        name: of the engine's tensor.
        weights: the checkpoint weights that it fuses; one if it is not fused.
        split: the dimension that tensor parallelism splits. None: every rank has the whole tensor.
        fusion: the order of the fused weights.
        units: for each weight, into how many parts it can be split (heads of q, k and v). If there
            are more ranks, several ranks have the same part. Empty: into any number of parts.
        padded: the size of dimension `split` with padding, before it is split. 0: no padding.
        stage: the pipeline stage. None: every stage has the tensor.
        expert: the number of the expert, if it is the tensor of one. Tensor parallelism splits it
            too.
        boxes: for each weight, the part of it that the tensor has. Empty: the whole weights.
    """

    name: str
    weights: tuple[str, ...]
    split: int | None = None
    fusion: Fusion = "parts"
    units: tuple[int, ...] = ()
    padded: int = 0
    stage: int | None = None
    expert: int | None = None
    boxes: tuple[Box, ...] = ()

    def parts(self, weights: Mapping[str, Weight]) -> list[StoredTensor]:
        """Return the parts that the tensor fuses, before they are split over ranks."""
        whole_weights = [stored_whole(weights[name]) for name in self.weights]
        if not self.boxes:
            return whole_weights
        parts = []
        for part, box in zip(whole_weights, self.boxes, strict=True):
            for dim, span in enumerate(box):
                part = part.narrow(dim, *span)
            parts.append(part)
        return parts


@dataclass(frozen=True)
class Degrees:
    """Ranks in each dimension: tensor, expert, shard (FSDP), replicas, pipeline; tensor innermost.

    `expert` ranks have different experts, and the same copy of everything else. `shard` ranks
    split each tensor once more on dimension 0, as FSDP does. With `spread`, the ranks of a stage
    have different experts, whole ones, in place of `expert`: each consecutive `spread` ranks have
    all experts, whichever parts of the other tensors they have.
    """

    tensor: int = 1
    expert: int = 1
    shard: int = 1
    replicas: int = 1
    pipeline: int = 1
    spread: int = 1

    def __post_init__(self) -> None:
        wrong = {name: value for name, value in vars(self).items() if value < 1}
        if wrong:
            raise ConfigError(f"a parallel degree must be at least 1, got {wrong}")

    @property
    def world_size(self) -> int:
        return self.tensor * self.expert * self.shard * self.replicas * self.pipeline

    def place(self, rank: int) -> Place:
        """Return the coordinates of a rank."""
        # tensor 2, shard 3, pipeline 2: rank 9 = 1 + 2 · (1 + 3 · 1)
        rest, tensor = divmod(rank, self.tensor)
        rest, expert = divmod(rest, self.expert)
        rest, shard = divmod(rest, self.shard)
        stage, replica = divmod(rest, self.replicas)
        return Place(tensor, expert, shard, replica, stage)

    def expert_place(self, rank: int) -> tuple[int, int]:
        """Return (which experts a rank has, which of the ranks with the same experts it is)."""
        # tensor 2, replicas 2, spread 4: ranks 0 to 3 have one quarter of the experts each.
        if self.spread > 1:
            replica, part = divmod(rank % (self.world_size // self.pipeline), self.spread)
            return part, replica
        place = self.place(rank)
        return place.expert, place.replica


@dataclass(frozen=True)
class Place:
    """The coordinates of a rank in `Degrees`."""

    tensor: int
    expert: int
    shard: int
    replica: int
    stage: int


@dataclass(frozen=True)
class Model:
    """The weights of a checkpoint and how an engine stores them.

    `tied`: name → weight with which it shares storage.
    """

    weights: Mapping[str, Weight]
    stored: tuple[Stored, ...]
    tied: Mapping[str, str] = field(default_factory=dict)


def torch_chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return the span of one part as `torch.chunk` and FSDP2 split a dimension.

    All parts have ⌈size / parts⌉ indices but the last ones, which have fewer or none: 5 indices in
    4 parts are 2, 2, 1 and 0.
    """
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


def replicated_layout(
    weights: Iterable[Weight], ranks: Iterable[int], tied: Mapping[str, str] | None = None
) -> Layout:
    """Return the layout in which each rank has every weight, whole and under its own name."""
    known = by_name(weights)
    tensors = tuple(map(stored_whole, known.values()))
    return Layout(known, dict.fromkeys(ranks, tensors), tied or {})


def fsdp_layout(
    weights: Iterable[Weight],
    shards: int,
    replicas: int = 1,
    tied: Mapping[str, str] | None = None,
) -> Layout:
    """Return the layout of FSDP2 on a mesh of `replicas` × `shards` ranks, shards innermost."""
    known = by_name(weights)
    stored = tuple(Stored(name, (name,)) for name in known)
    return parallel_layout(
        Model(known, stored, tied or {}), Degrees(shard=shards, replicas=replicas)
    )


def parallel_layout(model: Model, degrees: Degrees) -> Layout:
    """Return the layout of a model over all ranks of `degrees`.

    Raises:
        ShapeError: a dimension does not divide by the tensor-parallel ranks.
        ConfigError: the number of experts does not divide by the expert-parallel ranks.
    """
    experts = len({stored.expert for stored in model.stored} - {None})
    parts = max(degrees.expert, degrees.spread)
    if experts % parts:
        raise ConfigError(f"{experts} experts do not divide by {parts} expert-parallel ranks")
    per_rank = experts // parts
    ranks: dict[int, tuple[StoredTensor, ...]] = {}
    for rank in range(degrees.world_size):
        place, (own, _) = degrees.place(rank), degrees.expert_place(rank)
        split = (degrees.tensor, place.tensor)
        of_experts = (1, 0) if degrees.spread > 1 else split
        ranks[rank] = tuple(
            _sharded(
                _tensor_parallel(model, stored, *(split if stored.expert is None else of_experts)),
                degrees,
                place,
            )
            for stored in model.stored
            if stored.stage in (None, place.stage)
            and (stored.expert is None or stored.expert // per_rank == own)
        )
    return Layout(model.weights, ranks, model.tied)


def _sharded(tensor: StoredTensor, degrees: Degrees, place: Place) -> StoredTensor:
    """Return the FSDP shard of a rank's tensor."""
    if degrees.shard == 1 or not tensor.shape:
        return tensor
    return tensor.narrow(0, *torch_chunk(tensor.shape[0], degrees.shard, place.shard))


def _tensor_parallel(model: Model, stored: Stored, ranks: int, index: int) -> StoredTensor:
    """Return what tensor-parallel rank `index` has of a tensor."""
    parts = stored.parts(model.weights)
    if stored.fusion == "query groups":
        fused = _query_groups(stored, parts)
        return _even_part(fused, stored.split or 0, ranks, index, len(parts) and stored.units[-1])
    if stored.split is not None:
        if stored.padded:
            parts = [part.pad(stored.split, stored.padded) for part in parts]
        units = stored.units or (0,) * len(parts)
        parts = [
            _even_part(part, stored.split, ranks, index, unit)
            for part, unit in zip(parts, units, strict=True)
        ]
    if len(parts) == 1:
        return parts[0].named(stored.name)
    return concatenated(stored.name, parts, stored.split or 0)


def _even_part(
    tensor: StoredTensor, dim: int, ranks: int, index: int, units: int = 0
) -> StoredTensor:
    """Return one of equal parts. With fewer units than ranks, neighbours have the same part."""
    # 2 key heads on 4 ranks: ranks 0 and 1 have head 0, ranks 2 and 3 have head 1.
    parts = min(ranks, units) if units else ranks
    size = tensor.shape[dim]
    if size % parts or (units and units % parts) or ranks % parts:
        raise ShapeError(
            f"tensor {tensor.name!r}: {size} indices of dimension {dim}"
            + (f" in {units} heads" if units else "")
            + f" do not divide by {ranks} tensor-parallel ranks"
        )
    step = size // parts
    part = index // (ranks // parts)
    return tensor.narrow(dim, part * step, (part + 1) * step)


def _query_groups(stored: Stored, parts: Sequence[StoredTensor]) -> StoredTensor:
    """Return q, k and v by query group: q of group 0, k of it, v of it, q of group 1, …"""
    # 4 query heads and 2 key heads of 1 row: q0 q1 k0 v0 q2 q3 k1 v1
    groups = stored.units[-1]
    rows = [part.shape[0] // groups for part in parts]
    members = [
        part.narrow(0, group * step, (group + 1) * step)
        for group in range(groups)
        for part, step in zip(parts, rows, strict=True)
    ]
    return concatenated(stored.name, members)


def lora_adapters(
    stored: Stored, weight: Weight, rank: int, prefix: str = ""
) -> tuple[tuple[Weight, Weight], tuple[Stored, Stored]]:
    """Return the weights of a LoRA adapter (arXiv 2106.09685) of rank `rank`, and their storage.

    `lora_A` [rank, in] and `lora_B` [out, rank] of a weight [out, in]. If the weight is split by
    rows, `lora_B` is split by rows and each rank has the whole `lora_A`; if it is split by columns,
    `lora_A` is split by columns and each rank has the whole `lora_B`.
    """
    out_size, in_size = weight.shape
    base = prefix + weight.name.removesuffix(".weight")
    low = Weight(f"{base}.lora_A.weight", (rank, in_size), weight.itemsize)
    high = Weight(f"{base}.lora_B.weight", (out_size, rank), weight.itemsize)
    units = stored.units if len(stored.weights) == 1 else ()
    return (low, high), (
        Stored(low.name, (low.name,), 1 if stored.split == 1 else None, stage=stored.stage),
        Stored(
            high.name, (high.name,), 0 if stored.split == 0 else None, units=units,
            stage=stored.stage,
        ),
    )  # fmt: skip
