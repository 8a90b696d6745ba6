"""Where each element of each checkpoint weight is stored: the layout of weights over ranks.

A rank stores tensors. A tensor consists of pieces: boxes of checkpoint weights. Elements of a
tensor that belong to no piece are padding. Nothing here uses torch.

Example: `q` [4, 2], `k` [2, 2] and `v` [2, 2] in one fused tensor, over 2 ranks by query group.
Group 0 is rows 0 and 1 of `q`, row 0 of `k` and row 0 of `v`:

    rank 0: qkv [4, 2]                 rank 1: qkv [4, 2]
      rows 0 to 2   q rows 0 to 2        rows 0 to 2   q rows 2 to 4
      row  2        k row  0             row  2        k row  1
      row  3        v row  0             row  3        v row  1
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from quadriga.errors import ShapeError
from quadriga.parallel.layouts.boxes import (
    Box,
    count,
    intersection,
    moved,
    narrowed,
    shape_of,
    whole,
)


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of the checkpoint. `itemsize`: bytes of an element."""

    name: str
    shape: tuple[int, ...]
    itemsize: int = 4

    @property
    def num_bytes(self) -> int:
        return count(whole(self.shape)) * self.itemsize


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

    def __post_init__(self) -> None:
        for piece in self.pieces:
            if shape_of(piece.box) != shape_of(piece.at):
                raise ShapeError(
                    f"tensor {self.name!r}: box {piece.box} of weight {piece.weight!r} and box "
                    f"{piece.at} of the tensor must have the same sizes"
                )

    def named(self, name: str) -> StoredTensor:
        """Return the same tensor under another name."""
        return replace(self, name=name)

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
        """Return the tensor with `size` indices in one dimension; those behind are padding.

        Raises:
            ShapeError: the tensor is larger.
        """
        if size < self.shape[dim]:
            raise ShapeError(
                f"tensor {self.name!r} has {self.shape[dim]} indices in dimension {dim}, which "
                f"cannot be padded to {size}"
            )
        return replace(self, shape=(*self.shape[:dim], size, *self.shape[dim + 1 :]))


def stored_whole(weight: Weight) -> StoredTensor:
    """Return a tensor that is one whole weight, under its name."""
    return stored_box(weight.name, whole(weight.shape))


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

    Raises:
        ShapeError: a piece lies outside its weight, or is of a weight that is not in `weights`.
    """

    weights: Mapping[str, Weight]
    ranks: Mapping[int, tuple[StoredTensor, ...]]
    tied: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for rank, piece in self.pieces():
            weight = self.weights.get(piece.weight)
            if weight is None or not _inside(piece.box, weight.shape):
                known = "which is no weight" if weight is None else f"of shape {weight.shape}"
                raise ShapeError(f"rank {rank} stores box {piece.box} of {piece.weight!r}, {known}")

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """Yield (rank, piece) of every piece."""
        for rank, tensors in self.ranks.items():
            for tensor in tensors:
                for piece in tensor.pieces:
                    yield rank, piece

    def shifted(self, offset: int) -> Layout:
        """Return the same layout on other processes: rank r becomes rank r + `offset`."""
        return replace(self, ranks={rank + offset: t for rank, t in self.ranks.items()})

    def own_bytes(self, rank: int) -> int:
        """Return the bytes of weights that a rank stores, without padding."""
        sizes = {name: weight.itemsize for name, weight in self.weights.items()}
        pieces = (piece for tensor in self.ranks[rank] for piece in tensor.pieces)
        return sum(count(piece.box) * sizes[piece.weight] for piece in pieces)

    @property
    def num_bytes(self) -> int:
        """The bytes of one copy of all weights: M in the formulas of `grouping`."""
        return sum(weight.num_bytes for weight in self.weights.values())


def _inside(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)
    )


def by_name(weights: Iterable[Weight]) -> dict[str, Weight]:
    """Return the weights by their names, in order."""
    return {weight.name: weight for weight in weights}
