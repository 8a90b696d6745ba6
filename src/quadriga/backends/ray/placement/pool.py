"""`RayResourcePool`: bundles of resources on Ray nodes, with one placement group per node."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from contextlib import ExitStack

from ray.util.placement_group import PlacementGroup, remove_placement_group

from quadriga.backends.ray.placement.placement_groups import (
    PLACE_TIMEOUT_S,
    PoolRequest,
    Strategy,
    alive_nodes,
    place,
)
from quadriga.errors import PlacementError
from quadriga.single_controller.placement.feasibility import PoolNeeds, check_feasible
from quadriga.single_controller.placement.resource_pool import ResourcePool, check_mergeable
from quadriga.single_controller.placement.resource_pool import (
    merge_resource_pool as merge_resource_pool,
)
from quadriga.single_controller.placement.resource_pool import (
    split_resource_pool as split_resource_pool,
)

_ALIKE = ("use_gpu", "accelerator_type", "max_colocate_count", "n_gpus_per_node", "detached")
TRACE = 1e-4
"""How much of an accelerator type's resource a bundle asks for: enough to choose the node."""
_placing = threading.Lock()
"""Held while a pool is placed: several threads may start groups on one pool."""


class RayResourcePool(ResourcePool):
    """`process_on_nodes=[8, 8]`: two nodes with eight bundles each.

    One rank of a group uses one bundle: `max_colocate_count` CPUs, and one GPU or NPU if `use_gpu`.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
        n_gpus_per_node: int = 8,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count, n_gpus_per_node)
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix or f"{uuid.uuid4().hex[:6]}_"
        self.label = self.name_prefix.rstrip("_")
        self.detached = detached
        self.accelerator_type = accelerator_type
        self.pgs: list[PlacementGroup] | None = None
        self.placed_together: tuple[RayResourcePool, ...] = ()
        """Pools that were checked together: the placement of the first places all of them."""

    def needs(self, device_name: str = "cuda", spread: bool = False) -> PoolNeeds:
        """Return the resources that this pool needs.

        `spread`: its processes may be on any node (PACK), so that no node needs room for several.
        """
        store = [1] * self.world_size if spread else self.store
        return PoolNeeds(self.label, tuple(store), self.bundle(device_name))

    def get_placement_groups(
        self,
        strategy: Strategy = "STRICT_PACK",
        name: str | None = None,
        device_name: str = "cuda",
        timeout: float = PLACE_TIMEOUT_S,
    ) -> list[PlacementGroup]:
        """Return one placement group per node, in the order of the nodes' addresses.

        The first call makes them. Raises `PlacementError` if the nodes cannot hold them, before any
        group is made, or if the bundles are not free within `timeout` seconds.
        """
        with _placing:
            if self.pgs is None:
                companions = [p for p in self.placed_together if p.pgs is None]
                pools = companions or [self]
                spread = strategy != "STRICT_PACK"
                check_feasible([pool.needs(device_name, spread) for pool in pools], alive_nodes())
                requests = [pool.request(device_name) for pool in pools]
                placed = place(requests, strategy, name, timeout)
                for pool, groups in zip(pools, placed, strict=True):
                    pool.pgs = groups
            return self.pgs or []

    def request(self, device_name: str) -> PoolRequest:
        """Return the resources that Ray is asked for."""
        store, bundle = tuple(self.store), self.bundle(device_name)
        return PoolRequest(self.label, self.name_prefix, store, bundle, self.detached)

    def roots(self) -> tuple[RayResourcePool, ...]:
        """Return the pools whose bundles this one uses: itself, or those of which it is a part."""
        return (self,)

    def detach(self) -> None:
        """Let the bundles outlive this driver, for a group with `detached=True`.

        Raises `PlacementError` if they exist already and end with the driver.
        """
        for root in self.roots():
            if root.pgs is not None and not root.detached:
                raise PlacementError(
                    f"A detached group cannot use pool {root.label!r}: its placement groups exist "
                    "and end with this driver. Make the pool with detached=True.",
                    pool=root.label,
                )
        for pool in (self, *self.roots()):
            pool.detached = True

    def release(self) -> None:
        """Remove the placement groups. Processes that still run there are ended."""
        groups, self.pgs = self.pgs or [], None
        with ExitStack() as stack:  # all are removed before an error of one is raised
            for group in reversed(groups):
                stack.callback(remove_placement_group, group)

    def bundle(self, device_name: str) -> dict[str, float]:
        """Return the resources of one process."""
        bundle: dict[str, float] = {"CPU": self.max_colocate_count}
        if self.use_gpu:
            bundle["NPU" if device_name == "npu" else "GPU"] = 1
            if self.accelerator_type is not None:
                bundle[self.accelerator_type] = TRACE
        return bundle

    def part(self, start: int, count: int) -> SubRayResourcePool:
        """Return a pool of `count` bundles, from bundle `start` on."""
        return SubRayResourcePool(self, start, count)

    def merged_with(self, other: ResourcePool) -> MergedRayResourcePool:
        """Return a pool of the bundles of both.

        Raises `PlacementError` if their settings differ.
        """
        return MergedRayResourcePool(self, other)


class SubRayResourcePool(RayResourcePool):
    """`count` bundles of another pool, from bundle `start` on."""

    def __init__(self, parent: RayResourcePool, start: int, count: int) -> None:
        self.parent = parent
        self.start_bundle_index = start
        super().__init__(
            parent.counts_of(start, count),
            parent.use_gpu,
            parent.name_prefix,
            parent.max_colocate_count,
            parent.detached,
            parent.accelerator_type,
            parent.n_gpus_per_node,
        )
        self.label = parent.label

    def roots(self) -> tuple[RayResourcePool, ...]:
        return self.parent.roots()

    def get_placement_groups(
        self,
        strategy: Strategy = "STRICT_PACK",
        name: str | None = None,
        device_name: str = "cuda",
        timeout: float = PLACE_TIMEOUT_S,
    ) -> list[PlacementGroup]:
        """Return all placement groups of the parent; `bundles_of_ranks` says which are used."""
        return self.parent.get_placement_groups(strategy, name, device_name, timeout)

    def bundles_of_ranks(self) -> list[tuple[int, int]]:
        start = self.start_bundle_index
        return self.parent.bundles_of_ranks()[start : start + self.world_size]


class MergedRayResourcePool(RayResourcePool):
    """The bundles of two pools: the first pool's, then the second's."""

    def __init__(self, first: RayResourcePool, second: ResourcePool) -> None:
        if not isinstance(second, RayResourcePool):
            raise PlacementError(f"{first!r} is a pool on Ray, {second!r} is not.")
        check_mergeable(first, second, _ALIKE)
        self.first, self.second = first, second
        super().__init__(
            [*first.store, *second.store],
            first.use_gpu,
            f"{first.name_prefix}_{second.name_prefix}",
            first.max_colocate_count,
            first.detached,
            first.accelerator_type,
            first.n_gpus_per_node,
        )
        self.label = f"{first.label}+{second.label}"

    def roots(self) -> tuple[RayResourcePool, ...]:
        return (*self.first.roots(), *self.second.roots())

    def get_placement_groups(
        self,
        strategy: Strategy = "STRICT_PACK",
        name: str | None = None,
        device_name: str = "cuda",
        timeout: float = PLACE_TIMEOUT_S,
    ) -> list[PlacementGroup]:
        """Return the first pool's groups, then the second's."""
        return [
            *self.first.get_placement_groups(strategy, name, device_name, timeout),
            *self.second.get_placement_groups(strategy, name, device_name, timeout),
        ]

    def bundles_of_ranks(self) -> list[tuple[int, int]]:
        groups = len(self.first.get_placement_groups())
        second = self.second.bundles_of_ranks()
        return [
            *self.first.bundles_of_ranks(),
            *((group + groups, bundle) for group, bundle in second),
        ]
