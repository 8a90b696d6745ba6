"""Making the placement groups of pools: the largest first, each on one node."""

from __future__ import annotations

import itertools
import logging
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from quadriga.backends.ray.cluster import cluster_nodes, free_resources
from quadriga.errors import PlacementError
from quadriga.single_controller.placement.feasibility import NodeResources

logger = logging.getLogger("quadriga.controller")

Strategy: TypeAlias = Literal["STRICT_PACK", "PACK", "STRICT_SPREAD", "SPREAD"]
"""How Ray places the bundles of one group; STRICT_PACK: all on one node."""

PLACE_TIMEOUT_S = 120.0
LOG_S = 10.0
"""After how long a wait for bundles is logged."""


@dataclass(frozen=True)
class PoolRequest:
    """What one pool asks Ray for."""

    label: str
    """The name of the pool in messages."""
    name_prefix: str
    store: tuple[int, ...]
    """Processes on each node."""
    bundle: dict[str, float]
    """Resources of one process."""
    detached: bool
    """The groups outlive this driver."""


@dataclass(frozen=True)
class _Part:
    """What one pool asks for on one node; `place` is (number of the pool, number of the node)."""

    pool: PoolRequest
    place: tuple[int, int]
    count: int

    @property
    def size(self) -> tuple[float, ...]:
        """Sort key: devices first, because they are scarcer than CPUs."""
        bundle = self.pool.bundle
        devices = bundle.get("GPU", 0) + bundle.get("NPU", 0)
        return devices * self.count, bundle["CPU"] * self.count


def place(
    pools: Sequence[PoolRequest], strategy: Strategy, name: str | None, timeout: float
) -> list[list[PlacementGroup]]:
    """Make the placement groups of all pools: for each pool one group per node.

    Ray gives each group the node that suits it best at that moment. Larger groups are therefore
    placed before smaller ones are asked for. With two free nodes of 2 and 8 GPUs and the pools [2]
    and [8]:

        asked for in the order of the pools    [2] may get 2 GPUs of the large node; [8] never fits
        asked for by size                      [8] gets the large node, then [2] the small one

    Raises `PlacementError` after `timeout` seconds. No group is kept after an error.
    """
    parts = [
        _Part(pool, (number, node), count)
        for number, pool in enumerate(pools)
        for node, count in enumerate(pool.store)
    ]
    parts.sort(key=lambda part: part.size, reverse=True)
    made: dict[tuple[int, int], PlacementGroup] = {}
    deadline = time.monotonic() + timeout
    try:
        for _, same_size in itertools.groupby(parts, key=lambda part: part.size):
            batch = list(same_size)
            for part in batch:
                made[part.place] = _make(part, strategy, name)
            if not _await([made[part.place] for part in batch], batch[0].pool, deadline):
                raise _no_room(batch[0].pool, timeout)
    except BaseException:  # Ctrl-C too: a user waits here while other jobs hold the devices
        for group in made.values():
            remove_placement_group(group)
        raise
    return [
        sort_by_node_address([made[number, node] for node in range(len(pool.store))])
        for number, pool in enumerate(pools)
    ]


def _make(part: _Part, strategy: Strategy, name: str | None) -> PlacementGroup:
    prefix = name or f"{part.pool.name_prefix}{uuid.uuid4().hex[:6]}:"
    group: PlacementGroup = placement_group(
        bundles=[dict(part.pool.bundle) for _ in range(part.count)],
        strategy=strategy,
        name=f"{prefix}{part.place[1]}",
        lifetime="detached" if part.pool.detached else None,
    )
    return group


def _await(groups: list[PlacementGroup], pool: PoolRequest, deadline: float) -> bool:
    """Wait until all groups are placed; return False if the deadline is exceeded."""
    ready = [group.ready() for group in groups]
    logged = False
    while (left := deadline - time.monotonic()) > 0:
        try:
            ray.get(ready, timeout=min(LOG_S, left))
            return True
        except GetTimeoutError:
            if not logged:
                logger.warning("pool %s waits for bundles; free now: %s", pool.label, _free_text())
                logged = True
    return False


def _no_room(pool: PoolRequest, timeout: float) -> PlacementError:
    return PlacementError(
        f"Pool {pool.label!r} {list(pool.store)}: its bundles were not free within "
        f"{timeout:.0f} s. Each process asks for {pool.bundle}; free now: {_free_text()}. Other "
        "jobs, or other pools of this one, hold the rest.",
        pool=pool.label,
        wanted=pool.bundle,
        available=free_resources(),
    )


def sort_by_node_address(groups: Sequence[PlacementGroup]) -> list[PlacementGroup]:
    """Return the groups by the address of their node, so that a rank keeps its node at a restart.

    Only groups of one size are sorted among themselves, because group i of a pool must have the
    size of node i. With the sizes [2, 3, 2] on the nodes 10.0.0.10, 10.0.0.1 and 10.0.0.9 the
    result has the nodes 10.0.0.9, 10.0.0.1 and 10.0.0.10.
    """
    addresses = {node.node_id: node.address for node in cluster_nodes()}

    def key(group: PlacementGroup) -> tuple[_AddressKey, str]:
        node_id = nodes_of_bundles(group)[0]
        return _address_key(addresses.get(node_id, "")), node_id

    result = list(groups)
    for size in {group.bundle_count for group in groups}:
        slots = [i for i, group in enumerate(groups) if group.bundle_count == size]
        ordered = sorted((groups[i] for i in slots), key=key)
        for slot, group in zip(slots, ordered, strict=True):
            result[slot] = group
    return result


def nodes_of_bundles(group: PlacementGroup) -> Mapping[int, str]:
    """Return the node id of each bundle of a group that has been placed."""
    nodes: Mapping[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return nodes


def local_places(places: Sequence[tuple[PlacementGroup, int]]) -> list[tuple[int, int]]:
    """Return (local rank, local world size) of each rank, from its (placement group, bundle).

    Local are the ranks of one placement group on one node. A PACK group may be on several nodes:
    with bundles on the nodes [a, a, b, a] the result is [(0, 3), (1, 3), (0, 1), (2, 3)].
    """
    groups = {group.id: group for group, _ in places}
    nodes = {group_id: nodes_of_bundles(group) for group_id, group in groups.items()}
    keys = [(group.id, nodes[group.id].get(bundle)) for group, bundle in places]
    sizes = Counter(keys)
    numbers: Counter[object] = Counter()
    local = []
    for key in keys:
        local.append((numbers[key], sizes[key]))
        numbers[key] += 1
    return local


_AddressKey: TypeAlias = tuple[int, tuple[int, ...], str]


def _address_key(address: str) -> _AddressKey:
    """Sort IPv4 addresses by their numbers, and before names."""
    parts = address.split(".")
    if all(part.isdigit() for part in parts):
        return 0, tuple(map(int, parts)), ""
    return 1, (), address


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


def _free_text() -> str:
    free = free_resources()
    shown = [f"{kind} {free[kind]:g}" for kind in ("CPU", "GPU", "NPU") if free.get(kind)]
    return ", ".join(shown) or "nothing"
