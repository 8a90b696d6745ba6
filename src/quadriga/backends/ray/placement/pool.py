"""`RayResourcePool`: places on Ray nodes, one placement group a node."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence

from ray.util.placement_group import PlacementGroup, remove_placement_group

from quadriga.backends.ray.placement.placement_groups import (
    PLACE_TIMEOUT_S,
    PoolWants,
    alive_nodes,
    place,
)
from quadriga.errors import PlacementError
from quadriga.single_controller.placement.feasibility import PoolNeeds, check_feasible
from quadriga.single_controller.placement.resource_pool import ResourcePool, check_mergeable

_ALIKE = ("use_gpu", "accelerator_type", "max_colocate_count", "n_gpus_per_node", "detached")
TRACE = 1e-4
"""How much of an accelerator type's resource a bundle asks for: enough to choose the node."""
_placing = threading.Lock()
"""Groups may be started from several threads; a pool is placed once."""


class RayResourcePool(ResourcePool):
    """`process_on_nodes=[8, 8]`: two nodes with eight places each.

    A place is one bundle: `max_colocate_count` CPUs, and one GPU or NPU if `use_gpu`.
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
        """Pools that must fit beside each other: the first that is placed places all."""

    def needs(self, device_name: str = "cuda", torn: bool = False) -> PoolNeeds:
        """What this pool asks of the nodes. `torn`: its places may lie on any of them (PACK)."""
        store = [1] * self.world_size if torn else self.store
        return PoolNeeds(self.label, tuple(store), self.bundle(device_name))

    def get_placement_groups(
        self,
        strategy: str = "STRICT_PACK",
        name: str | None = None,
        device_name: str = "cuda",
        timeout: float = PLACE_TIMEOUT_S,
    ) -> list[PlacementGroup]:
        """One placement group a node, made at the first call, in the order of node addresses.

        Raises PlacementError if the nodes cannot hold them, before anything is made, or if they
        are not free within `timeout` seconds.
        """
        with _placing:
            if self.pgs is None:
                companions = [p for p in self.placed_together if p.pgs is None]
                pools = companions or [self]
                torn = strategy != "STRICT_PACK"
                check_feasible([pool.needs(device_name, torn) for pool in pools], alive_nodes())
                wants = [pool.wants(device_name) for pool in pools]
                for pool, groups in zip(pools, place(wants, strategy, name, timeout), strict=True):
                    pool.pgs = groups
            return self.pgs or []

    def wants(self, device_name: str) -> PoolWants:
        """What is asked of Ray for this pool."""
        store, bundle = tuple(self.store), self.bundle(device_name)
        return PoolWants(self.label, self.name_prefix, store, bundle, self.detached)

    def roots(self) -> tuple[RayResourcePool, ...]:
        """The pools whose places this one uses: itself, or those that it is a part of."""
        return (self,)

    def release(self) -> None:
        """Give the places back; what still runs there is ended."""
        for group in self.pgs or []:
            remove_placement_group(group)
        self.pgs = None

    def bundle(self, device_name: str) -> dict[str, float]:
        """What one process asks for."""
        bundle: dict[str, float] = {"CPU": self.max_colocate_count}
        if self.use_gpu:
            bundle["NPU" if device_name == "npu" else "GPU"] = 1
            if self.accelerator_type is not None:
                bundle[self.accelerator_type] = TRACE
        return bundle

    def part(self, start: int, count: int) -> SubRayResourcePool:
        """`count` places from place `start` on."""
        return SubRayResourcePool(self, start, count)

    def merged_with(self, other: ResourcePool) -> MergedRayResourcePool:
        """The places of both. Raises PlacementError if their settings differ."""
        return MergedRayResourcePool(self, other)


class SubRayResourcePool(RayResourcePool):
    """A stretch of another pool's places: `count` of them from place `start` on."""

    def __init__(self, parent: RayResourcePool, start: int, count: int) -> None:
        self.parent = parent
        self.start_bundle_index = start
        super().__init__(
            parent.counts_of(range(start, start + count)),
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
        strategy: str = "STRICT_PACK",
        name: str | None = None,
        device_name: str = "cuda",
        timeout: float = PLACE_TIMEOUT_S,
    ) -> list[PlacementGroup]:
        """The parent's placement groups, all of them; `bundle_of_rank` says which are ours."""
        return self.parent.get_placement_groups(strategy, name, device_name, timeout)

    def bundle_of_rank(self, rank: int) -> tuple[int, int]:
        return self.parent.bundle_of_rank(self.start_bundle_index + rank)


class MergedRayResourcePool(RayResourcePool):
    """The places of two pools, the first pool's before the second's."""

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
        strategy: str = "STRICT_PACK",
        name: str | None = None,
        device_name: str = "cuda",
        timeout: float = PLACE_TIMEOUT_S,
    ) -> list[PlacementGroup]:
        """The first pool's groups, then the second's."""
        return [
            *self.first.get_placement_groups(strategy, name, device_name, timeout),
            *self.second.get_placement_groups(strategy, name, device_name, timeout),
        ]

    def bundle_of_rank(self, rank: int) -> tuple[int, int]:
        if rank < self.first.world_size:
            return self.first.bundle_of_rank(rank)
        group, bundle = self.second.bundle_of_rank(rank - self.first.world_size)
        return group + len(self.first.get_placement_groups()), bundle
