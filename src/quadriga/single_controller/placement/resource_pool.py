"""`ResourcePool`: how many processes run on each node."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
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
        ends = list(accumulate(self.store))
        counts, stop = [], start + count
        for end in ends[bisect_right(ends, start) :]:
            if start >= stop:
                break
            counts.append(min(end, stop) - start)
            start = end
        return counts

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
        if split_size < 1 or total % split_size:
            raise PlacementError(
                f"{resource_pool!r} has {total} bundles, which do not divide into parts of "
                f"{split_size}.",
                wanted=split_size,
                available=total,
            )
        sizes = [split_size] * (total // split_size)
    else:
        sizes = list(split_size)
        if sum(sizes) != total or any(size < 1 for size in sizes):
            raise PlacementError(
                f"{resource_pool!r} has {total} bundles, the parts {sizes} have {sum(sizes)}.",
                wanted=sizes,
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
