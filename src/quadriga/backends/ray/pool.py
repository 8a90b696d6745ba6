"""`RayResourcePool`: bundles of resources on Ray nodes, with one placement group per node.

Placement groups are made the largest first, each on one node.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeAlias, cast

import ray
from ray import PlacementGroupID
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from quadriga.backends.ray.cluster import cluster_nodes, free_resources
from quadriga.errors import PlacementError
from quadriga.single_controller.resource_pool import (
    NodeResources,
    PoolNeeds,
    ResourcePool,
    check_feasible,
    check_mergeable,
    merge_resource_pool as merge_resource_pool,
    split_resource_pool as split_resource_pool,
)

logger = logging.getLogger("quadriga.controller")

Strategy: TypeAlias = Literal["STRICT_PACK", "PACK", "STRICT_SPREAD", "SPREAD"]
"""How Ray places the bundles of one group; STRICT_PACK: all on one node."""

PLACE_TIMEOUT_S = 120.0
LOG_S = 10.0
"""After how long a wait for bundles is logged."""
LOOK_S = 2.0
"""Between two looks at the nodes in such a wait: Ray notices the loss of a node late."""


@dataclass(frozen=True)
class _Part:
    """What one pool asks for on one node; `place` is (number of the pool, number of the node)."""

    pool: RayResourcePool
    place: tuple[int, int]
    count: int
    bundle: dict[str, float]
    """Resources of one process."""

    @property
    def size(self) -> tuple[float, ...]:
        """Sort key: devices first, because they are scarcer than CPUs."""
        devices = self.bundle.get("GPU", 0) + self.bundle.get("NPU", 0)
        return devices * self.count, self.bundle["CPU"] * self.count


def place(
    pools: Sequence[RayResourcePool], strategy: Strategy, name: str | None, device_name: str
) -> list[list[PlacementGroup]]:
    """Make the placement groups of all pools: for each pool one group per node.

    Ray gives each group the node that suits it best at that moment. Larger groups are therefore
    placed before smaller ones are asked for. With two free nodes of 2 and 8 GPUs and the pools [2]
    and [8]:

        asked for in the order of the pools    [2] may get 2 GPUs of the large node; [8] never fits
        asked for by size                      [8] gets the large node, then [2] the small one

    Raises `PlacementError` if the nodes that are alive cannot hold them, at the beginning or while
    it waits, and after `PLACE_TIMEOUT_S`. No group is kept after an error.
    """
    needs = [pool.needs(device_name, spread=strategy != "STRICT_PACK") for pool in pools]
    check_feasible(needs, alive_nodes())
    parts = [
        _Part(pool, (number, node), count, pool.bundle(device_name))
        for number, pool in enumerate(pools)
        for node, count in enumerate(pool.store)
    ]
    parts.sort(key=lambda part: part.size, reverse=True)
    made: dict[tuple[int, int], PlacementGroup] = {}
    deadline = time.monotonic() + PLACE_TIMEOUT_S
    try:
        for _, same_size in groupby(parts, key=lambda part: part.size):
            batch = list(same_size)
            for part in batch:
                prefix = name or f"{part.pool.name_prefix}{uuid.uuid4().hex[:6]}:"
                rank = None if part.pool.detached else ray.get_runtime_context().get_actor_id()
                made[part.place] = placement_group(
                    bundles=[dict(part.bundle) for _ in range(part.count)],
                    strategy=strategy,
                    name=f"{prefix}{part.place[1]}{_made_by(rank) if rank else ''}",
                    lifetime="detached" if part.pool.detached else None,
                )
            _await([made[part.place] for part in batch], batch[0], deadline, needs)
    except BaseException:  # Ctrl-C too: a user waits here while other jobs hold the devices
        for group in made.values():
            remove_placement_group(group)
        raise
    return [
        sort_by_node_address([made[number, node] for node in range(len(pool.store))])
        for number, pool in enumerate(pools)
    ]


def _made_by(actor_id: str) -> str:
    """Return the end of the name of a placement group that a rank has made."""
    return f" of {actor_id}"


def release_pools_of(actor_ids: Iterable[str]) -> None:
    """Remove the placement groups that ranks made which have ended: Ray keeps them until the driver
    ends."""
    ends = tuple(map(_made_by, actor_ids))
    for group_id, row in ray.util.placement_group_table().items():
        if row["state"] != "REMOVED" and row["name"].endswith(ends):
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))


def _await(
    groups: list[PlacementGroup], part: _Part, deadline: float, needs: Sequence[PoolNeeds]
) -> None:
    """Wait until all groups are placed; raise `PlacementError` if they will not be."""
    ready = [group.ready() for group in groups]
    logged, began = False, time.monotonic()
    while (left := deadline - time.monotonic()) > 0:
        try:
            ray.get(ready, timeout=min(LOOK_S, left))
            return
        except GetTimeoutError:
            check_feasible(needs, alive_nodes())
        if not logged and time.monotonic() - began >= LOG_S:
            logger.warning("pool %s waits for bundles; free now: %s", part.pool.label, _free_text())
            logged = True
    raise PlacementError(
        f"Pool {part.pool.label!r} {part.pool.store}: its bundles were not free within "
        f"{PLACE_TIMEOUT_S:.0f} s. Each process asks for {part.bundle}; free now: {_free_text()}. "
        "Other jobs, or other pools of this one, hold the rest.",
        pool=part.pool.label,
        wanted=part.bundle,
        available=free_resources(),
    )


def sort_by_node_address(groups: Sequence[PlacementGroup]) -> list[PlacementGroup]:
    """Return the groups by the address of their node, so that a rank keeps its node at a restart.

    Only groups of one size are sorted among themselves, because group i of a pool must have the
    size of node i. With the sizes [2, 3, 2] on the nodes 10.0.0.10, 10.0.0.1 and 10.0.0.9 the
    result has the nodes 10.0.0.9, 10.0.0.1 and 10.0.0.10.
    """
    addresses = {node.node_id: node.address for node in cluster_nodes()}

    def key(group: PlacementGroup) -> tuple[tuple[int, int, str], str]:
        node_id = nodes_of_bundles(group)[0]
        return _address_key(addresses.get(node_id, "")), node_id

    ordered: dict[int, list[PlacementGroup]] = {}
    for group in sorted(groups, key=key, reverse=True):
        ordered.setdefault(group.bundle_count, []).append(group)
    return [ordered[group.bundle_count].pop() for group in groups]


def nodes_of_bundles(group: PlacementGroup) -> Mapping[int, str]:
    """Return the node id of each bundle of a group that has been placed."""
    return cast(Mapping[int, str], ray.util.placement_group_table(group)["bundles_to_node_id"])


def local_places(places: Sequence[tuple[PlacementGroup, int]]) -> list[tuple[int, int]]:
    """Return (local rank, local world size) of each rank, from its (placement group, bundle).

    Local are the ranks of one placement group on one node. A PACK group may be on several nodes:
    with bundles on the nodes [a, a, b, a] the result is [(0, 3), (1, 3), (0, 1), (2, 3)].
    """
    groups = {group.id: group for group, _ in places}
    nodes = {group_id: nodes_of_bundles(group) for group_id, group in groups.items()}
    keys = [(group.id, nodes[group.id].get(bundle)) for group, bundle in places]
    return local_ranks(keys)


def local_ranks(places: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return the number of each entry among the equal ones, and how many of these there are."""
    sizes = Counter(places)
    numbers: Counter[Hashable] = Counter()
    local = []
    for place in places:
        local.append((numbers[place], sizes[place]))
        numbers[place] += 1
    return local


def _address_key(address: str) -> tuple[int, int, str]:
    """Sort addresses by their numbers, and before names."""
    try:
        return 0, int(ipaddress.ip_address(address)), ""
    except ValueError:
        return 1, 0, address


def alive_nodes() -> list[NodeResources]:
    """Return the living nodes of the cluster with all that each has, in use or not.

    Raises `PlacementError` if this process is not connected to Ray.
    """
    if not ray.is_initialized():
        raise PlacementError(
            "This process is not connected to Ray, so the nodes of the cluster are not known. Call "
            'get_backend("ray").start() first, or use pools of the local backend '
            '(get_backend("local").resource_pool) with backend=local.'
        )
    return [NodeResources(node.address, node.resources) for node in cluster_nodes() if node.alive]


def free_nodes() -> list[NodeResources]:
    """Return the living nodes of the cluster with what no process holds of each."""
    free = ray._private.state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return [NodeResources(node, resources) for node, resources in free.items()]


def _free_text() -> str:
    free = free_resources()
    shown = [f"{kind} {free[kind]:g}" for kind in ("CPU", "GPU", "NPU") if free.get(kind)]
    return ", ".join(shown) or "nothing"


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
        self.taken: list[tuple[RayResourcePool, int]] = []
        """(pool, number of the bundle in it) of each bundle of a part of other pools; empty for a
        pool that has bundles of its own."""

    def needs(self, device_name: str = "cuda", spread: bool = False) -> PoolNeeds:
        """Return the resources that this pool needs.

        `spread`: its processes may be on any node (PACK), so that no node needs room for several.
        """
        store = [1] * self.world_size if spread else self.store
        return PoolNeeds(self.label, tuple(store), self.bundle(device_name))

    def get_placement_groups(
        self, strategy: Strategy = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> list[PlacementGroup]:
        """Return one placement group per node, in the order of the nodes' addresses.

        The first call makes them. A part of other pools returns all groups of these;
        `bundles_of_ranks` says which bundles it uses. Raises `PlacementError` if the nodes cannot
        hold them, before any group is made, or if the bundles are not free within two minutes.
        """
        groups: list[PlacementGroup] = []
        for root in self.roots():
            with _placing:
                if root.pgs is None:
                    pools = [p for p in root.placed_together if p.pgs is None] or [root]
                    placed = place(pools, strategy, name, device_name)
                    for pool, found in zip(pools, placed, strict=True):
                        pool.pgs = found
                groups += root.pgs or []
        return groups

    def roots(self) -> tuple[RayResourcePool, ...]:
        """Return the pools whose bundles this one uses: itself, or those of which it is a part."""
        return tuple(dict.fromkeys(root for root, _ in self.taken)) or (self,)

    def _bundles(self) -> list[tuple[RayResourcePool, int]]:
        return self.taken or [(self, number) for number in range(self.world_size)]

    def bundles_of_ranks(self) -> list[tuple[int, int]]:
        if not self.taken:
            return super().bundles_of_ranks()
        # Roots [2, 3] and [1, 1] have the groups 0, 1 and 2, 3.
        places: dict[RayResourcePool, list[tuple[int, int]]] = {}
        groups = 0
        for root in self.roots():
            places[root] = [(groups + group, i) for group, i in root.bundles_of_ranks()]
            groups += len(root.store)
        return [places[root][number] for root, number in self.taken]

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
        counts = self.counts_of(start, count)
        return SubRayResourcePool(self, counts, self._bundles()[start : start + count])

    def merged_with(self, other: ResourcePool) -> SubRayResourcePool:
        """Return a pool of the bundles of both.

        Raises `PlacementError` if their settings differ.
        """
        if not isinstance(other, RayResourcePool):
            raise PlacementError(f"{self!r} is a pool on Ray, {other!r} is not.")
        check_mergeable(self, other, _ALIKE)
        both = [*self._bundles(), *other._bundles()]
        merged = SubRayResourcePool(self, [*self.store, *other.store], both)
        merged.name_prefix = f"{self.name_prefix}_{other.name_prefix}"
        merged.label = f"{self.label}+{other.label}"
        return merged


class SubRayResourcePool(RayResourcePool):
    """Bundles of other pools, whose settings it has."""

    def __init__(
        self,
        parent: RayResourcePool,
        store: Sequence[int],
        taken: list[tuple[RayResourcePool, int]],
    ) -> None:
        """`parent`: the pool with the settings. `taken`: see `RayResourcePool`."""
        vars(self).update(vars(parent), pgs=None, placed_together=(), taken=taken)
        self._store = list(store)
