"""Which part of each checkpoint weight a rank stores.

A *box* is a rectangular part of a tensor, one span of indices for each dimension: rows 2 and 3 of a
tensor of shape [5, 4] are the box `((2, 4), (0, 4))`. A tensor without dimensions has one element,
whose box is `()`.

A rank stores tensors. A tensor consists of pieces: boxes of checkpoint weights. Elements of a
tensor that belong to no piece are padding. Example: `q` [4, 2], `k` [2, 2] and `v` [2, 2] in one
fused tensor, over 2 ranks by query group. Group 0 is rows 0 and 1 of `q`, row 0 of `k` and row 0 of
`v`:

    rank 0: qkv [4, 2]                 rank 1: qkv [4, 2]
      rows 0 to 2   q rows 0 to 2        rows 0 to 2   q rows 2 to 4
      row  2        k row  0             row  2        k row  1
      row  3        v row  0             row  3        v row  1

A `Stored` says how an engine stores one tensor: which weights it fuses, which dimension tensor
parallelism splits, on which pipeline stage it is, of which expert it is. `parallel_layout` builds
the layout of all ranks from them. The Megatron engine loads, saves and streams its weights by these
layouts, and a weight sync is planned from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch

from quadriga.errors import ShapeError

Span = tuple[int, int]
"""(start, stop): the indices from `start`, without `stop`."""

Box = tuple[Span, ...]
"""One span for each dimension."""


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box of all elements of a tensor of this shape."""
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the sizes of a box."""
    return tuple(stop - start for start, stop in box)


def count(box: Box) -> int:
    """Return the number of elements in a box."""
    return prod(stop - start for start, stop in box)


def slices(box: Box) -> tuple[slice, ...]:
    """Return the index with which a tensor gives the elements of a box."""
    return tuple(slice(start, stop) for start, stop in box)


def narrowed(box: Box, dim: int, start: int, stop: int) -> Box:
    """Return the box with another span in one dimension."""
    return (*box[:dim], (start, stop), *box[dim + 1 :])


def moved(box: Box, origin: Box, to: Box) -> Box:
    """Return where a part of `origin` is if `origin` is copied to `to`."""
    # Rows 2 to 6 of a weight are rows 0 to 4 of a shard. Its rows 3 to 4:
    #   moved(((3, 4),), origin=((2, 6),), to=((0, 4),)) == ((1, 2),)
    return tuple(
        (start - base + goal, stop - base + goal)
        for (start, stop), (base, _), (goal, _) in zip(box, origin, to, strict=True)
    )


def intersection(a: Box, b: Box) -> Box | None:
    """Return the elements that are in both boxes; None if there are none."""
    spans = []
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True):
        start, stop = max(a_start, b_start), min(a_stop, b_stop)
        if start >= stop:
            return None
        spans.append((start, stop))
    return tuple(spans)


def difference(box: Box, inside: Box) -> list[Box]:
    """Return boxes of the elements of `box` that are not in `inside`, which is part of `box`."""
    # Dimension by dimension, the part before and the part behind `inside` are cut off. What is
    # left of ((0, 4), (0, 6)) without ((1, 3), (2, 6)):
    #
    #   a a a a a a      a  ((0, 1), (0, 6))
    #   c c . . . .      b  ((3, 4), (0, 6))
    #   c c . . . .      c  ((1, 3), (0, 2))
    #   b b b b b b
    rest = []
    for dim, (start, stop) in enumerate(inside):
        if box[dim][0] < start:
            rest.append(narrowed(box, dim, box[dim][0], start))
        if stop < box[dim][1]:
            rest.append(narrowed(box, dim, stop, box[dim][1]))
        box = narrowed(box, dim, start, stop)
    return rest


def split(box: Box, limit: int) -> Iterator[Box]:
    """Yield boxes of at most `limit` elements that together are `box`.

    The first dimensions are split first, so that the parts are long runs of memory.
    """
    elements = count(box)
    if elements <= limit:
        yield box
        return
    # 3 × 4 elements with a limit of 8: a row has 4, so 2 rows, then 1. With a limit of 3 a row is
    # larger than the limit, and each row is split by itself.
    dim = next(dim for dim, size in enumerate(shape_of(box)) if size > 1)
    start, stop = box[dim]
    step = max(1, limit // (elements // (stop - start)))
    for first in range(start, stop, step):
        yield from split(narrowed(box, dim, first, min(first + step, stop)), limit)


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the checkpoint. `dtype`: in which it is sent."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a weight, and the box of the rank's tensor in which it is stored."""

    weight: str
    box: Box
    at: Box


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a rank. No two pieces overlap."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def narrow(self, dim: int, start: int, stop: int) -> StoredTensor:
        """Return the part with the indices from `start`, without `stop`, of one dimension."""
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        kept = narrowed(whole(self.shape), dim, start, stop)
        pieces = []
        for piece in self.pieces:
            part = intersection(piece.at, kept)
            if part is not None:
                box = moved(part, piece.at, piece.box)
                pieces.append(Piece(piece.weight, box, moved(part, kept, whole(shape))))
        return StoredTensor(self.name, shape, tuple(pieces))

    def pad(self, dim: int, size: int) -> StoredTensor:
        """Return the tensor with `size` indices in one dimension; those behind are padding."""
        return replace(self, shape=(*self.shape[:dim], size, *self.shape[dim + 1 :]))


def stored_box(name: str, box: Box) -> StoredTensor:
    """Return a tensor that is one box of a weight, under the name of the weight."""
    shape = shape_of(box)
    return StoredTensor(name, shape, (Piece(name, box, whole(shape)),))


def concatenated(name: str, parts: Sequence[StoredTensor], dim: int = 0) -> StoredTensor:
    """Return the tensors one after another in a dimension, as `torch.cat` joins them."""
    pieces = []
    offset = 0
    for part in parts:
        for piece in part.pieces:
            start, stop = piece.at[dim]
            at = narrowed(piece.at, dim, start + offset, stop + offset)
            pieces.append(Piece(piece.weight, piece.box, at))
        offset += part.shape[dim]
    shape = (*parts[0].shape[:dim], offset, *parts[0].shape[dim + 1 :])
    return StoredTensor(name, shape, tuple(pieces))


@dataclass(frozen=True)
class Layout:
    """The tensors of each rank.

    Attributes:
        weights: the checkpoint weights, by name and in the order in which they are sent.
        ranks: rank → its tensors. Ranks are numbers of processes: if two layouts share a number,
            the two ranks are one process.
        tied: name → name of the weight with which it shares its storage. A tied name is not in
            `weights`.
    """

    weights: Mapping[str, Weight]
    ranks: Mapping[int, tuple[StoredTensor, ...]]
    tied: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stored:
    """How an engine stores one tensor.

    Attributes:
        name: of the engine's tensor.
        weights: the checkpoint weights that it fuses; one if it is not fused.
        split: the dimension that tensor parallelism splits. None: every rank has the whole tensor.
        groups: the query groups of fused weights: for each group the rows of q, then of k, then of
            v (Megatron-core); tensor parallelism gives a rank whole groups. 0: the shards of the
            fused weights on a rank are one after another (gate and up).
        padded: the size of dimension `split` with padding, before it is split. 0: no padding.
        stage: the pipeline stage. None: every stage has the tensor.
        expert: the number of the expert, if it is the tensor of one. Tensor parallelism splits it
            too.
        boxes: for each weight, the part of it that the tensor has. Empty: the whole weights.
    """

    name: str
    weights: tuple[str, ...]
    split: int | None = None
    groups: int = 0
    padded: int = 0
    stage: int | None = None
    expert: int | None = None
    boxes: tuple[Box, ...] = ()

    def parts(self, weights: Mapping[str, Weight]) -> list[StoredTensor]:
        """Return the parts that the tensor fuses, before they are split over ranks."""
        boxes = self.boxes or [whole(weights[name].shape) for name in self.weights]
        return [stored_box(name, box) for name, box in zip(self.weights, boxes, strict=True)]


@dataclass(frozen=True)
class Degrees:
    """Ranks in each dimension: tensor, expert, replicas, pipeline; tensor innermost.

    `expert` ranks have different experts, and the same copy of everything else. With `spread`, the
    ranks of a stage have different experts, whole ones, in place of `expert`: each consecutive
    `spread` ranks have all experts, whichever parts of the other tensors they have.
    """

    tensor: int = 1
    expert: int = 1
    replicas: int = 1
    pipeline: int = 1
    spread: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor * self.expert * self.replicas * self.pipeline

    def place(self, rank: int) -> Place:
        """Return the coordinates of a rank."""
        # tensor 2, expert 3, pipeline 2: rank 9 = 1 + 2 · (1 + 3 · 1)
        rest, tensor = divmod(rank, self.tensor)
        rest, expert = divmod(rest, self.expert)
        stage, replica = divmod(rest, self.replicas)
        return Place(tensor, expert, replica, stage)

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
    replica: int
    stage: int


@dataclass(frozen=True)
class Model:
    """The weights of a checkpoint, tied names left out, and how an engine stores them."""

    weights: Mapping[str, Weight]
    stored: tuple[Stored, ...]


def parallel_layout(model: Model, degrees: Degrees) -> Layout:
    """Return the layout of a model over all ranks of `degrees`.

    Raises:
        ShapeError: a dimension does not divide by the tensor-parallel ranks.
    """
    experts = len({stored.expert for stored in model.stored} - {None})
    per_rank = experts // max(degrees.expert, degrees.spread)
    ranks: dict[int, tuple[StoredTensor, ...]] = {}
    for rank in range(degrees.world_size):
        place, (own, _) = degrees.place(rank), degrees.expert_place(rank)
        split = (degrees.tensor, place.tensor)
        of_experts = (1, 0) if degrees.spread > 1 else split
        tensors = []
        for stored in model.stored:
            if stored.stage not in (None, place.stage):
                continue
            if stored.expert is not None and stored.expert // per_rank != own:
                continue
            of_ranks = split if stored.expert is None else of_experts
            tensors.append(_tensor_parallel(model, stored, *of_ranks))
        ranks[rank] = tuple(tensors)
    return Layout(model.weights, ranks)


def _tensor_parallel(model: Model, stored: Stored, ranks: int, index: int) -> StoredTensor:
    """Return what tensor-parallel rank `index` has of a tensor."""
    parts = stored.parts(model.weights)
    if stored.groups:
        parts = [_query_groups(stored, parts)]
    if stored.split is not None:
        if stored.padded:
            parts = [part.pad(stored.split, stored.padded) for part in parts]
        parts = [_even_part(part, stored.split, ranks, index) for part in parts]
    if len(parts) == 1:
        return replace(parts[0], name=stored.name)
    return concatenated(stored.name, parts, stored.split or 0)


def _even_part(tensor: StoredTensor, dim: int, ranks: int, index: int) -> StoredTensor:
    """Return one of equal parts."""
    size = tensor.shape[dim]
    if size % ranks:
        raise ShapeError(
            f"tensor {tensor.name!r}: {size} indices of dimension {dim} do not divide by {ranks} "
            "tensor-parallel ranks"
        )
    step = size // ranks
    return tensor.narrow(dim, index * step, (index + 1) * step)


def _query_groups(stored: Stored, parts: Sequence[StoredTensor]) -> StoredTensor:
    """Return q, k and v by query group: q of group 0, k of it, v of it, q of group 1, …"""
    # 4 query heads and 2 key heads of 1 row: q0 q1 k0 v0 q2 q3 k1 v1
    rows = [part.shape[0] // stored.groups for part in parts]
    members = [
        part.narrow(0, group * step, (group + 1) * step)
        for group in range(stored.groups)
        for part, step in zip(parts, rows, strict=True)
    ]
    return concatenated(stored.name, members)
