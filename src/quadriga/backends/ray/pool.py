"""`RayResourcePool`: places on Ray nodes, one placement group a node."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from quadriga.errors import PlacementError
from quadriga.single_controller.placement import NodeResources, PoolNeeds, check_feasible
from quadriga.single_controller.resource_pool import ResourcePool

logger = logging.getLogger("quadriga.controller")

PLACE_TIMEOUT_S = 120.0
SPEAK_S = 10.0
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

    def needs(self, device_name: str = "cuda") -> PoolNeeds:
        """What this pool asks of the nodes."""
        return PoolNeeds(self.label, tuple(self.store), self._bundle(device_name))

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
        if self.pgs is not None:
            return self.pgs
        if strategy == "STRICT_PACK":
            check_feasible([self.needs(device_name)], alive_nodes())
        bundle = self._bundle(device_name)
        prefix = name or f"{self.name_prefix}{uuid.uuid4().hex[:6]}:"
        groups = [
            placement_group(
                bundles=[dict(bundle) for _ in range(count)],
                strategy=strategy,
                name=f"{prefix}{index}",
                lifetime="detached" if self.detached else None,
            )
            for index, count in enumerate(self.store)
        ]
        self._await_places(groups, bundle, timeout)
        self.pgs = sort_by_node_address(groups)
        return self.pgs

    def _await_places(
        self, groups: list[PlacementGroup], bundle: dict[str, float], timeout: float
    ) -> None:
        ready = [group.ready() for group in groups]
        try:
            ray.get(ready, timeout=min(SPEAK_S, timeout))
            return
        except ray.exceptions.GetTimeoutError:
            logger.warning("pool %s waits for places; free now: %s", self.label, _free_text())
        try:
            ray.get(ready, timeout=max(0.0, timeout - SPEAK_S))
        except ray.exceptions.GetTimeoutError:
            for group in groups:
                remove_placement_group(group)
            raise PlacementError(
                f"{self!r}: its places were not free within {timeout:.0f} s. Each process asks "
                f"for {bundle}; free now: {_free_text()}. Other jobs, or pools of this one, hold "
                "the rest.",
                pool=self.label,
                wanted=bundle,
                available=ray.available_resources(),
            ) from None

    def release(self) -> None:
        """Give the places back; what still runs there is ended."""
        for group in self.pgs or []:
            remove_placement_group(group)
        self.pgs = None

    def _bundle(self, device_name: str) -> dict[str, float]:
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


def sort_by_node_address(groups: Sequence[PlacementGroup]) -> list[PlacementGroup]:
    """In the order of their nodes' addresses, so that a rank keeps its node over restarts."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}

    def key(group: PlacementGroup) -> tuple[Any, ...]:
        table = ray.util.placement_group_table(group)
        nodes = table["bundles_to_node_id"]
        return _address_key(addresses.get(nodes[0], "")), nodes[0]

    # Groups of different sizes keep their places: only groups of one size change among themselves.
    result = list(groups)
    for size in {group.bundle_count for group in groups}:
        slots = [i for i, group in enumerate(groups) if group.bundle_count == size]
        ordered = sorted((groups[i] for i in slots), key=key)
        for slot, group in zip(slots, ordered, strict=True):
            result[slot] = group
    return result


def _address_key(address: str) -> tuple[Any, ...]:
    parts = address.split(".")
    if all(part.isdigit() for part in parts):
        return (0, *map(int, parts))
    return (1, address)


def alive_nodes() -> list[NodeResources]:
    """The nodes of the cluster with what each has in all."""
    return [
        NodeResources(node["NodeManagerAddress"], dict(node["Resources"]))
        for node in ray.nodes()
        if node["Alive"]
    ]


def _nodes_of(parent: RayResourcePool, start: int, count: int) -> list[int]:
    groups = [parent.bundle_of_rank(start + i)[0] for i in range(count)]
    return [groups.count(group) for group in dict.fromkeys(groups)]


def _free_text() -> str:
    free = ray.available_resources()
    return ", ".join(f"{k} {v:g}" for k, v in sorted(free.items()) if ":" not in k) or "nothing"
