"""Boxes: rectangular parts of a tensor, as one span of indices for each dimension.

The box of rows 2 and 3 of a tensor of shape [5, 4] is `((2, 4), (0, 4))`: dimension d has the
indices from `box[d][0]` up to `box[d][1]`, without the last. A tensor without dimensions has one
element, whose box is `()`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

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
