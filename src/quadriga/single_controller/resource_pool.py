"""`ResourcePool`: how many processes run on each node, and whether pools fit on nodes.

The check is arithmetic and runs before any process starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar, cast

from quadriga.errors import PlacementError


class ResourcePool:
    """Bundles of resources on nodes: `process_on_nodes=[8, 8]` is two nodes with eight each.

    A bundle is what one process of a worker group uses: one GPU, or some CPUs. At most
    `max_colocate_count` worker groups share a bundle. Ranks are numbered node by node.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        max_colocate_count: int = 10,
        n_gpus_per_node: int = 8,
    ) -> None:
        counts = list(process_on_nodes or [])
        if any(not isinstance(n, int) or n < 1 for n in counts):
            raise PlacementError(
                f"process_on_nodes must hold counts of 1 or more, got {counts}.", wanted=counts
            )
        if max_colocate_count < 1:
            raise PlacementError(
                f"max_colocate_count must be 1 or more, got {max_colocate_count}.",
                wanted=max_colocate_count,
            )
        self._store = counts
        self.max_colocate_count = max_colocate_count
        self.n_gpus_per_node = n_gpus_per_node

    def add_node(self, process_count: int) -> None:
        """Add a node with `process_count` bundles."""
        self._store.append(process_count)

    @property
    def world_size(self) -> int:
        """The number of bundles on all nodes."""
        return sum(self._store)

    @property
    def store(self) -> list[int]:
        """The number of bundles on each node."""
        return self._store

    def __call__(self) -> list[int]:
        return self._store

    def local_world_size_list(self) -> list[int]:
        """Return for each rank the number of ranks on its node: [2, 3] -> [2, 2, 3, 3, 3]."""
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """Return for each rank its number on its node: [2, 3] -> [0, 1, 0, 1, 2]."""
        return [local for count in self._store for local in range(count)]

    def bundles_of_ranks(self) -> list[tuple[int, int]]:
        """Return (index of the node, index of the bundle on the node) of each rank.

        [2, 3] -> [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)].
        """
        return [(node, local) for node, count in enumerate(self.store) for local in range(count)]

    def counts_of(self, start: int, count: int) -> list[int]:
        """Return how many of the bundles `start` to `start + count - 1` each node has, without
        nodes that have none: for [2, 3, 4], bundles 1 to 5, [1, 3, 1]."""
        bundles = ResourcePool.bundles_of_ranks(self)[start : start + count]
        return list(Counter(node for node, _ in bundles).values())

    def part(self, start: int, count: int) -> ResourcePool:
        """Return a pool of the bundles `start` to `start + count - 1`."""
        counts = self.counts_of(start, count)
        return ResourcePool(counts, self.max_colocate_count, self.n_gpus_per_node)

    def merged_with(self, other: ResourcePool) -> ResourcePool:
        """Return a pool of the bundles of both, this pool's first.

        Raises `PlacementError` if their settings differ.
        """
        check_mergeable(self, other, ("max_colocate_count", "n_gpus_per_node"))
        return ResourcePool(
            [*self.store, *other.store], self.max_colocate_count, self.n_gpus_per_node
        )

    def release(self) -> None:
        """Give back what the pool holds of the nodes. The next group of the pool places it again.

        A pool of one process holds nothing.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store})"


PoolT = TypeVar("PoolT", bound=ResourcePool)


def split_resource_pool(resource_pool: PoolT, split_size: int | Sequence[int]) -> list[PoolT]:
    """Split a pool into pools of `split_size` bundles each, or of the sizes in a list.

    The resulting pools may be split again. Raises `PlacementError` if the sizes do not sum to the
    size of the pool.
    """
    total = resource_pool.world_size
    if isinstance(split_size, int):
        sizes = [split_size] * (total // max(split_size, 1))
    else:
        sizes = list(split_size)
    if sum(sizes) != total or any(size < 1 for size in sizes):
        raise PlacementError(
            f"{resource_pool!r} has {total} bundles, which do not divide into parts of "
            f"{split_size}: the parts {sizes} have {sum(sizes)}.",
            wanted=split_size,
            available=total,
        )
    # sizes [1, 4] start at bundles 0 and 1
    starts = accumulate(sizes[:-1], initial=0)
    parts = [resource_pool.part(start, size) for start, size in zip(starts, sizes, strict=True)]
    return cast(list[PoolT], parts)


def merge_resource_pool(rp1: PoolT, rp2: PoolT) -> PoolT:
    """Merge two pools into one. Raises `PlacementError` if their settings differ."""
    return cast(PoolT, rp1.merged_with(rp2))


def check_mergeable(first: ResourcePool, second: ResourcePool, settings: Sequence[str]) -> None:
    """Raise PlacementError naming the first of `settings` in which two pools differ."""
    for what in settings:
        if getattr(first, what) != getattr(second, what):
            raise PlacementError(
                f"Pools can only be merged if they agree in {what}, got {getattr(first, what)} and "
                f"{getattr(second, what)}."
            )


STEPS = 20_000
"""Placements that are tried before the search ends and leaves the decision to the backend."""


@dataclass(frozen=True)
class NodeResources:
    """One node and its resources ("CPU", "GPU", …)."""

    name: str
    resources: Mapping[str, float]


@dataclass(frozen=True)
class PoolNeeds:
    """One pool: the number of processes on each of its nodes, and the needs of one process."""

    name: str
    process_on_nodes: tuple[int, ...]
    per_process: Mapping[str, float]


@dataclass(frozen=True)
class _Part:
    """The processes of a pool that must run on one node."""

    pool: str
    processes: int
    wanted: dict[str, float]


def check_feasible(pools: Sequence[PoolNeeds], nodes: Sequence[NodeResources]) -> None:
    """Raise PlacementError unless all parts of all pools fit on the nodes at the same time.

    A part is the set of processes of a pool that must run on one node, so sufficient totals are
    not enough. Example: 8 GPUs on one node do not fit on two nodes with 5 free GPUs each. The
    error names the pool and shows the arithmetic.
    """
    parts = [
        _Part(pool.name, count, {k: v * count for k, v in pool.per_process.items() if v})
        for pool in pools
        for count in pool.process_on_nodes
    ]
    for part in parts:
        if not any(_fits(part.wanted, node.resources) for node in nodes):
            wants = f"{part.processes} processes on one node, that is {_amounts(part.wanted)}"
            raise _refused(f"Pool {part.pool!r} wants {wants}; no node has that much.", part, nodes)
    # Large parts first: a small part has more nodes to choose from.
    ordered = sorted(parts, key=lambda part: sorted(part.wanted.values()), reverse=True)
    last = _without_node(ordered, nodes) if ordered else None
    if last is not None:
        asked = "; ".join(f"{p.name!r} {list(p.process_on_nodes)}" for p in pools)
        lacks = f"Pool {last.pool!r} is left without {_amounts(last.wanted)} on one node."
        raise _refused(f"The pools do not fit on the nodes together: {asked}. {lacks}", last, nodes)


def _refused(text: str, part: _Part, nodes: Sequence[NodeResources]) -> PlacementError:
    available = {node.name: dict(node.resources) for node in nodes}
    text = f"{text} {_nodes_text(nodes, part)}"
    return PlacementError(text, pool=part.pool, wanted=part.wanted, available=available)


def _without_node(parts: Sequence[_Part], nodes: Sequence[NodeResources]) -> _Part | None:
    """Search a node for each part, depth first. Return a part that gets none; None: all have one.

    None as well after STEPS attempts. Example: 6, 5, 3, 2 GPUs on two nodes with 8 free GPUs each.

        part 6 → node 0    free 2 8
        part 5 → node 1    free 2 3     node 0 has only 2
        part 3 → node 1    free 2 0
        part 2 → node 0    free 0 0     every part has a node

    If a part fits on no node, the part before it moves to its next node. Two rules skip equivalent
    assignments: a part that equals the one before it takes the same node or a later one, and a node
    with the same free resources as a node that failed for this part is not tried.
    """
    free = [dict(node.resources) for node in nodes]
    taken: list[int] = []  # the node of each part so far
    deepest = 0

    def possible() -> Iterator[int]:
        part = parts[len(taken)]
        equal = bool(taken) and part.wanted == parts[len(taken) - 1].wanted
        tried: list[dict[str, float]] = []
        for index in range(taken[-1] if equal else 0, len(free)):
            if _fits(part.wanted, free[index]) and free[index] not in tried:
                tried.append(dict(free[index]))
                yield index

    # A list of iterators instead of a recursion: a cluster has 1000s of parts.
    choices = [possible()]
    for _ in range(STEPS):
        node = next(choices[-1], None)
        if node is not None:
            _take(free[node], parts[len(taken)].wanted, 1)
            taken.append(node)
            if len(taken) == len(parts):
                return None
            deepest = max(deepest, len(taken))
            choices.append(possible())
            continue
        choices.pop()
        if not choices:
            return parts[deepest]
        failed = taken.pop()
        _take(free[failed], parts[len(taken)].wanted, -1)
    return None


def _fits(wanted: Mapping[str, float], free: Mapping[str, float]) -> bool:
    # 1e-9: sums of fractions such as 1/3 GPU are not exact.
    return all(free.get(kind, 0.0) + 1e-9 >= amount for kind, amount in wanted.items())


def _take(node: dict[str, float], wanted: Mapping[str, float], sign: int) -> None:
    """Subtract `wanted` from the free resources of a node; `sign=-1` gives it back."""
    for kind, amount in wanted.items():
        node[kind] = node.get(kind, 0.0) - sign * amount


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {kind}" for kind, amount in resources.items())


def _nodes_text(nodes: Sequence[NodeResources], part: _Part) -> str:
    if not nodes:
        return "There is no node."
    shown = "; ".join(
        f"{node.name} has {_amounts({k: node.resources.get(k, 0.0) for k in part.wanted})}"
        for node in list(nodes)[:8]
    )
    more = f" and {len(nodes) - 8} more nodes" if len(nodes) > 8 else ""
    return f"{shown}{more}. {_advice(nodes, part)}"


def _advice(nodes: Sequence[NodeResources], part: _Part) -> str:
    lacking = [
        kind
        for kind, amount in part.wanted.items()
        if not any(_fits({kind: amount}, node.resources) for node in nodes)
    ]
    devices = [kind for kind in lacking if kind != "CPU"]
    if not devices:
        return "Ask for fewer processes, or lower max_colocate_count (CPUs each)."
    if any(node.resources.get(kind, 0.0) for node in nodes for kind in devices):
        return f"Ask for fewer processes on a node: each of them wants a {devices[0]}."
    return (
        f"No node has a {devices[0]}: set trainer.device=cpu or auto, or, for a pool of your "
        "program, use_gpu=False."
    )
