"""verl's resource pools by role, and placement groups of pools that exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from quadriga.backends.ray import RayResourcePool
from quadriga.backends.ray.cluster import ensure_ray
from quadriga.backends.ray.pool import alive_nodes, sort_by_node_address
from quadriga.errors import PlacementError
from quadriga.single_controller.resource_pool import check_feasible

RoleT = TypeVar("RoleT")

sort_placement_group_by_node_ip = sort_by_node_address


class PlacementGroup(Protocol):
    """The attribute of Ray's placement groups that is used here."""

    @property
    def bundle_count(self) -> int: ...


@dataclass
class ResourcePoolManager(Generic[RoleT]):
    """Create resource pools by name, and find the pool of a role.

    `resource_pool_spec`: pool name → ranks per node. `mapping`: role → pool name.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: Mapping[RoleT, str]
    max_colocate_count: int = 3
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Create every pool.

        Raises `PlacementError` unless all fit on the nodes at the same time.
        """
        ensure_ray()  # as Ray's own functions do, if the program has not called ray.init
        pools = {
            name: RayResourcePool(
                ranks,
                use_gpu=True,
                name_prefix=name,
                max_colocate_count=self.max_colocate_count,
            )
            for name, ranks in self.resource_pool_spec.items()
        }
        check_feasible([pool.needs() for pool in pools.values()], alive_nodes())
        self.resource_pool_dict.update(pools)

    def get_resource_pool(self, role: RoleT) -> RayResourcePool:
        """Return the pool of a role."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Return the number of ranks in all pools."""
        return sum(map(sum, self.resource_pool_spec.values()))


def extract_pg_from_exist(
    resource_pools: Mapping[str, RayResourcePool],
    src_role_names: Sequence[str],
    resource_pool: RayResourcePool,
) -> list[PlacementGroup]:
    """Choose placement groups of existing pools, one for each node of `resource_pool`.

    Only pools of `src_role_names` are considered. Raises `PlacementError` if their placement groups
    do not have enough bundles.
    """
    # Largest first: resource_pool.store [1, 3] with groups of 4 and 2 bundles gives node 1
    # (3 ranks) the group of 4, then node 0 (1 rank) the group of 2; returned in node order.
    found = [
        group
        for name, pool in resource_pools.items()
        if name in src_role_names
        for group in pool.get_placement_groups()
    ]
    found.sort(key=lambda group: group.bundle_count, reverse=True)
    wanted = sorted(enumerate(resource_pool.store), key=lambda pair: pair[1], reverse=True)
    chosen: dict[int, PlacementGroup] = {}
    for (index, count), group in zip(wanted, found, strict=False):
        if count <= group.bundle_count:
            chosen[index] = group
    if len(chosen) < len(wanted):
        raise PlacementError(
            f"{resource_pool!r} needs placement groups with {resource_pool.store} bundles; those "
            f"of {list(src_role_names)} have {[g.bundle_count for g in found]}. Use larger pools.",
            wanted=resource_pool.store,
        )
    return [chosen[index] for index in range(len(wanted))]
