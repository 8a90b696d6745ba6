"""Making the placement groups of pools: the largest first, each on one node."""

from __future__ import annotations

import itertools
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from quadriga.errors import PlacementError
from quadriga.single_controller.placement.feasibility import NodeResources

logger = logging.getLogger("quadriga.controller")

PLACE_TIMEOUT_S = 120.0
SPEAK_S = 10.0


@dataclass(frozen=True)
class PoolWants:
    """What one pool asks for."""

    label: str
    """What messages call it."""
    name_prefix: str
    store: tuple[int, ...]
    """Processes on each node."""
    bundle: dict[str, float]
    """What one process asks for."""
    detached: bool


@dataclass(frozen=True)
class _Part:
    """What one pool wants on one node; `place` is (pool, node) by number."""

    pool: PoolWants
    place: tuple[int, int]
    count: int

    @property
    def size(self) -> tuple[float, ...]:
        bundle = self.pool.bundle
        scarce = bundle.get("GPU", 0) + bundle.get("NPU", 0)
        return scarce * self.count, bundle["CPU"] * self.count


def place(
    pools: Sequence[PoolWants], strategy: str, name: str | None, timeout: float
) -> list[list[PlacementGroup]]:
    """Make the placement groups of all pools: for each pool one group a node.

    Ray gives each group the node that suits it best at that moment. Larger groups are therefore
    placed before smaller ones are asked for: else a small one may take the room that only the
    large one needed. Raises PlacementError after `timeout` seconds; nothing is kept then.
    """
    parts = [
        _Part(pool, (number, node), count)
        for number, pool in enumerate(pools)
        for node, count in enumerate(pool.store)
    ]
    parts.sort(key=lambda part: part.size, reverse=True)
    made: dict[tuple[int, int], PlacementGroup] = {}
    deadline = time.monotonic() + timeout
    for _, same_size in itertools.groupby(parts, key=lambda part: part.size):
        batch = list(same_size)
        for part in batch:
            made[part.place] = _make(part, strategy, name)
        if not _await([made[part.place] for part in batch], batch[0].pool, deadline):
            for group in made.values():
                remove_placement_group(group)
            raise _no_room(batch[0].pool, timeout)
    return [
        sort_by_node_address([made[number, node] for node in range(len(pool.store))])
        for number, pool in enumerate(pools)
    ]


def _make(part: _Part, strategy: str, name: str | None) -> PlacementGroup:
    prefix = name or f"{part.pool.name_prefix}{uuid.uuid4().hex[:6]}:"
    return placement_group(
        bundles=[dict(part.pool.bundle) for _ in range(part.count)],
        strategy=strategy,
        name=f"{prefix}{part.place[1]}",
        lifetime="detached" if part.pool.detached else None,
    )


def _await(groups: list[PlacementGroup], pool: PoolWants, deadline: float) -> bool:
    ready = [group.ready() for group in groups]
    spoken = False
    while (left := deadline - time.monotonic()) > 0:
        try:
            ray.get(ready, timeout=min(SPEAK_S, left))
            return True
        except GetTimeoutError:
            if not spoken:
                logger.warning("pool %s waits for places; free now: %s", pool.label, _free_text())
                spoken = True
    return False


def _no_room(pool: PoolWants, timeout: float) -> PlacementError:
    return PlacementError(
        f"Pool {pool.label!r} {list(pool.store)}: its places were not free within "
        f"{timeout:.0f} s. Each process asks for {pool.bundle}; free now: {_free_text()}. Other "
        "jobs, or other pools of this one, hold the rest.",
        pool=pool.label,
        wanted=pool.bundle,
        available=ray.available_resources(),
    )


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


def local_places(places: Sequence[tuple[PlacementGroup, int]]) -> list[tuple[int, int]]:
    """For each rank's (placement group, bundle): its number among the ranks of that group on its
    node, and how many those are. A PACK group may lie on several nodes."""
    nodes = {
        group.id: ray.util.placement_group_table(group)["bundles_to_node_id"] for group, _ in places
    }
    keys = [(group.id, nodes[group.id].get(bundle)) for group, bundle in places]
    return [(keys[:rank].count(key), keys.count(key)) for rank, key in enumerate(keys)]


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


def _free_text() -> str:
    free = ray.available_resources()
    shown = [f"{kind} {free[kind]:g}" for kind in ("CPU", "GPU", "NPU") if free.get(kind)]
    return ", ".join(shown) or "nothing"
