"""`RayResourcePool`: places on Ray nodes, one placement group a node."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from ray.util.placement_group import PlacementGroup, remove_placement_group

from quadriga.backends.ray.placing import PLACE_TIMEOUT_S, alive_nodes, place
from quadriga.errors import PlacementError
from quadriga.single_controller.placement import PoolNeeds, check_feasible
from quadriga.single_controller.resource_pool import ResourcePool

TRACE = 1e-4
"""How much of an accelerator type's resource a bundle asks for: enough to choose the node."""


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

    def needs(self, device_name: str = "cuda") -> PoolNeeds:
        """What this pool asks of the nodes."""
        return PoolNeeds(self.label, tuple(self.store), self.bundle(device_name))

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
        if self.pgs is None:
            companions = [p for p in self.placed_together if p.pgs is None]
            pools = companions or [self]
            if strategy == "STRICT_PACK":
                check_feasible([pool.needs(device_name) for pool in pools], alive_nodes())
            place(pools, strategy, name, device_name, timeout)
        return self.pgs or []

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

    def bundle_of_rank(self, rank: int) -> tuple[int, int]:
        """(index of the placement group, index of the bundle in it) of a rank."""
        for index, count in enumerate(self.store):
            if rank < count:
                return index, rank
            rank -= count
        raise PlacementError(f"{self!r} has no rank {rank}.", pool=self.label)


class SubRayResourcePool(RayResourcePool):
    """A stretch of another pool's places: `count` of them from place `start` on."""

    def __init__(self, parent: RayResourcePool, start: int, count: int) -> None:
        self.parent = parent
        self.start_bundle_index = start
        super().__init__(
            _nodes_of(parent, start, count),
            parent.use_gpu,
            parent.name_prefix,
            parent.max_colocate_count,
            parent.detached,
            parent.accelerator_type,
            parent.n_gpus_per_node,
        )

    def needs(self, device_name: str = "cuda") -> PoolNeeds:
        """Nothing: the parent's places are used."""
        return PoolNeeds(self.name_prefix, (), {})

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

    def __init__(self, first: RayResourcePool, second: RayResourcePool) -> None:
        for what in ("use_gpu", "max_colocate_count", "n_gpus_per_node", "detached"):
            if getattr(first, what) != getattr(second, what):
                raise PlacementError(
                    f"Pools that are merged must agree in {what}: {getattr(first, what)} and "
                    f"{getattr(second, what)}."
                )
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


def split_resource_pool(
    resource_pool: RayResourcePool, split_size: int | Sequence[int]
) -> list[SubRayResourcePool]:
    """Cut a pool into parts of `split_size` places each, or of the sizes listed.

    Raises PlacementError if the parts do not add up to the pool.
    """
    total = resource_pool.world_size
    if isinstance(split_size, int):
        if split_size < 1 or total % split_size:
            raise PlacementError(
                f"{resource_pool!r} has {total} places, which do not divide into parts of "
                f"{split_size}.",
                wanted=split_size,
                available=total,
            )
        sizes = [split_size] * (total // split_size)
    else:
        sizes = list(split_size)
        if sum(sizes) != total or any(size < 1 for size in sizes):
            raise PlacementError(
                f"{resource_pool!r} has {total} places, the parts {sizes} have {sum(sizes)}.",
                wanted=sizes,
                available=total,
            )
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        SubRayResourcePool(resource_pool, start, size)
        for start, size in zip(starts, sizes, strict=True)
    ]


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> MergedRayResourcePool:
    """One pool over the places of two. Raises PlacementError if their settings differ."""
    return MergedRayResourcePool(rp1, rp2)


def _nodes_of(parent: RayResourcePool, start: int, count: int) -> list[int]:
    groups = [parent.bundle_of_rank(start + i)[0] for i in range(count)]
    return [groups.count(group) for group in dict.fromkeys(groups)]
