"""Which rank sends which part of which weight to whom: pure, from two layouts.

consumes      the layout of the training engine and the layout of the rollout engine
produces      transfers; each element that a target rank stores is written by exactly one of them

A target rank takes what it can from itself. For the rest, every source rank that stores a part is
an owner of it. The owner is on the target's node if there is one, and has sent the fewest bytes so
far.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from quadriga.errors import WorkerError
from quadriga.parallel.layouts import (
    Box,
    Layout,
    Piece,
    count,
    difference,
    intersection,
    moved,
    split,
    whole,
)

NAMED_TENSORS = 20
"""An error message lists at most so many tensors."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A box of a tensor of a rank."""

    tensor: str
    box: Box


@dataclass(frozen=True, slots=True)
class Transfer:
    """One box of a weight, from a source rank to a target rank; equal ranks are one process."""

    source: int
    target: int
    weight: str
    box: Box
    read: Slot
    write: Slot
    num_bytes: int

    @property
    def is_local(self) -> bool:
        """Whether source and target are one process."""
        return self.source == self.target

    def parts(self, limit: int) -> Iterator[Transfer]:
        """Yield transfers of at most `limit` bytes, and of at least one element."""
        if self.num_bytes <= limit:
            yield self
            return
        itemsize = self.num_bytes // count(self.box)
        for box in split(self.box, max(1, limit // itemsize)):
            read, write = (
                Slot(slot.tensor, moved(box, self.box, slot.box))
                for slot in (self.read, self.write)
            )
            size = count(box) * itemsize
            yield replace(self, box=box, read=read, write=write, num_bytes=size)


@dataclass(frozen=True)
class Round:
    """Transfers that are in flight together. `staged`: rank → bytes in its buffers."""

    transfers: tuple[Transfer, ...]
    staged: Mapping[int, int]


@dataclass(frozen=True)
class Plan:
    """All transfers of one weight sync, weight by weight in the order of the target's weights.

    Attributes:
        source, target: the layouts.
        transfers: in order.
    """

    source: Layout
    target: Layout
    transfers: tuple[Transfer, ...]

    @cached_property
    def link_bytes(self) -> Counter[tuple[int, int]]:
        """(source rank, target rank) → bytes, for different processes."""
        found: Counter[tuple[int, int]] = Counter()
        for transfer in self.transfers:
            if not transfer.is_local:
                found[transfer.source, transfer.target] += transfer.num_bytes
        return found

    def rounds(self, bucket_bytes: int) -> Iterator[Round]:
        """Yield the transfers in rounds, in order.

        While one round is in flight, the next is packed, so two are in memory. Each rank stages
        at most `bucket_bytes` for both: what it sends and what it receives. Local transfers need no
        buffer. One element is never split, so the smallest bucket is 4 elements.
        """
        # bucket_bytes 400 leaves 200 a round and 100 a transfer. Rank 0 sends 80, 80, 80 bytes to
        # rank 1: the third would make 240, so the rounds are (80, 80) and (80).
        limit = bucket_bytes // 2
        current: list[Transfer] = []
        staged: Counter[int] = Counter()
        for transfer in self.transfers:
            for part in (transfer,) if transfer.is_local else transfer.parts(limit // 2):
                size = 0 if part.is_local else part.num_bytes
                if current and max(staged[part.source], staged[part.target]) + size > limit:
                    yield Round(tuple(current), dict(staged))
                    current, staged = [], Counter()
                current.append(part)
                if size:
                    staged[part.source] += size
                    staged[part.target] += size
        if current:
            yield Round(tuple(current), dict(staged))


def plan(source: Layout, target: Layout, nodes: Mapping[int, str] | None = None) -> Plan:
    """Return the transfers that give every target rank its weights.

    Args:
        source, target: of the same weights.
        nodes: rank → its node. Owners on the node of the target are preferred.

    Raises:
        WorkerError: no source rank stores an element of a weight. Attributes: `tensor` (the first
            one), `tensors` (all of them).
    """
    owners, nodes = _owners(source), nodes or {}
    wanted: list[_Wanted] = []
    missing: dict[str, None] = {}
    for rank, tensors in target.ranks.items():
        for name, piece in ((tensor.name, piece) for tensor in tensors for piece in tensor.pieces):
            rest = [piece.box] if count(piece.box) else []
            available = owners[piece.weight]
            # What the rank stores itself comes first.
            for box, stores in sorted(available.items(), key=lambda item: rank not in item[1]):
                found, rest = _cut(rest, box)
                wanted += [_Wanted(rank, name, piece, part, box, stores) for part in found]
            if rest:
                missing[piece.weight] = None
    if missing:
        raise wrong_weights(
            "the rollout engine has weights of which no rank of the training engine stores all "
            f"elements: {listed_names([*missing])}; both must load the same model folder",
            *missing,
        )
    itemsizes = {name: weight.dtype.itemsize for name, weight in target.weights.items()}
    order = {name: index for index, name in enumerate(target.weights)}
    sent: Counter[int] = Counter()
    transfers = []
    # The largest first, so that the small ones level out the differences.
    for want in sorted(wanted, key=lambda w: -count(w.part) * itemsizes[w.piece.weight]):
        owner, piece = want.rank, want.piece
        size = count(want.part) * itemsizes[piece.weight]
        if owner not in want.stores:
            near = [r for r in want.stores if nodes.get(r, -1) == nodes.get(want.rank)]
            owner = min(near or want.stores, key=lambda r: (sent[r], r))
            sent[owner] += size
        store = want.stores[owner]
        read = Slot(store.tensor, moved(want.part, want.box, store.box))
        write = Slot(want.tensor, moved(want.part, piece.box, piece.at))
        transfers.append(Transfer(owner, want.rank, piece.weight, want.part, read, write, size))
    transfers.sort(key=lambda t: (order[t.weight], t.target, t.box))
    return Plan(source, target, tuple(transfers))


def canonical_boxes(layout: Layout) -> dict[int, list[tuple[str, Box, Slot]]]:
    """Return rank → (weight, box, where it is stored), so that each element is listed once.

    Ranks that store the same elements share the work. Digests are computed from these boxes.
    """
    found: dict[int, list[tuple[str, Box, Slot]]] = {rank: [] for rank in layout.ranks}
    load: Counter[int] = Counter()
    owners = _owners(layout)
    for name, weight in layout.weights.items():
        rest = [whole(weight.shape)]
        for box, stores in owners[name].items():
            parts, rest = _cut(rest, box)
            for part in parts:
                rank = min(stores, key=lambda r: (load[r], r))
                load[rank] += count(part)
                slot = stores[rank]
                at = Slot(slot.tensor, moved(part, box, slot.box))
                found[rank].append((name, part, at))
    return found


class _Wanted(NamedTuple):
    """A part of a piece of a tensor of the target, and the ranks that store a box with it."""

    rank: int
    tensor: str
    piece: Piece
    part: Box
    box: Box
    stores: Mapping[int, Slot]


def _owners(layout: Layout) -> Mapping[str, dict[Box, dict[int, Slot]]]:
    """Return weight → box → rank → where the rank stores that box."""
    found: dict[str, dict[Box, dict[int, Slot]]] = defaultdict(dict)
    for rank, tensors in layout.ranks.items():
        for tensor in tensors:
            for piece in tensor.pieces:
                stores = found[piece.weight].setdefault(piece.box, {})
                stores.setdefault(rank, Slot(tensor.name, piece.at))
    return found


def _cut(rest: Sequence[Box], box: Box) -> tuple[list[Box], list[Box]]:
    """Return the parts of `rest` that are in `box`, and what is left of `rest`."""
    found, left = [], []
    for old in rest:
        part = intersection(old, box)
        if part is None:
            left.append(old)
        else:
            found.append(part)
            left += difference(old, part)
    return found, left


def wrong_weights(problem: str, *names: str) -> WorkerError:
    """Return the error of these weights. Attributes: `tensor` (the first one), `tensors`."""
    return WorkerError(problem, tensor=names[0], tensors=names)


def listed_names(names: Sequence[str]) -> str:
    """Return the names for a message: quoted, at most `NAMED_TENSORS` of them, and the number."""
    quoted = ", ".join(repr(name) for name in names[:NAMED_TENSORS])
    more = len(names) - NAMED_TENSORS
    return quoted if more <= 0 else f"{quoted} and {more} more"
