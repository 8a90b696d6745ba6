"""Whether pools fit on nodes: arithmetic, before anything starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quadriga.errors import PlacementError

STEPS = 20_000
"""Placements tried before the search gives up and lets the engine decide."""


@dataclass(frozen=True)
class NodeResources:
    """One machine and what it has."""

    name: str
    resources: Mapping[str, float]


@dataclass(frozen=True)
class PoolNeeds:
    """A pool: how many processes on each of its nodes, and what one process asks for."""

    name: str
    process_on_nodes: tuple[int, ...]
    per_process: Mapping[str, float]


@dataclass(frozen=True)
class _Part:
    pool: str
    processes: int
    wanted: dict[str, float]


def check_feasible(pools: Sequence[PoolNeeds], nodes: Sequence[NodeResources]) -> None:
    """Raises PlacementError unless all parts of all pools fit on the nodes at once.

    A part is what a pool wants on one of its nodes: it cannot be torn apart, so that totals that
    suffice may still not be placeable. The message names the pool and does the arithmetic.
    """
    parts = [
        _Part(pool.name, count, {k: v * count for k, v in pool.per_process.items() if v})
        for pool in pools
        for count in pool.process_on_nodes
    ]
    for part in parts:
        if not any(_fits(part.wanted, node.resources) for node in nodes):
            raise PlacementError(
                f"Pool {part.pool!r} wants {part.processes} processes on one node, that is "
                f"{_amounts(part.wanted)}; no node has that much. {_nodes_text(nodes, part)}",
                pool=part.pool,
                wanted=part.wanted,
                available={node.name: dict(node.resources) for node in nodes},
            )
    ordered = sorted(parts, key=lambda part: sorted(part.wanted.values()), reverse=True)
    free = [dict(node.resources) for node in nodes]
    budget = [STEPS]
    if not _place(ordered, 0, free, budget):
        last = ordered[_furthest(ordered, nodes)]
        raise PlacementError(
            "The pools do not fit on the nodes together: "
            + "; ".join(f"{p.name!r} {list(p.process_on_nodes)}" for p in pools)
            + f". Pool {last.pool!r} is left without {_amounts(last.wanted)} on one node. "
            + _nodes_text(nodes, last),
            pool=last.pool,
            wanted=last.wanted,
            available={node.name: dict(node.resources) for node in nodes},
        )


def _place(
    parts: Sequence[_Part], index: int, free: list[dict[str, float]], budget: list[int]
) -> bool:
    if index == len(parts) or budget[0] <= 0:
        return True
    tried: list[dict[str, float]] = []
    for node in free:
        if node in tried or not _fits(parts[index].wanted, node):
            continue
        tried.append(dict(node))
        budget[0] -= 1
        _take(node, parts[index].wanted, -1)
        if _place(parts, index + 1, free, budget):
            return True
        _take(node, parts[index].wanted, 1)
    return False


def _furthest(parts: Sequence[_Part], nodes: Sequence[NodeResources]) -> int:
    """The first part that finds no room when each takes the first node that has it."""
    free = [dict(node.resources) for node in nodes]
    for index, part in enumerate(parts):
        home = next((node for node in free if _fits(part.wanted, node)), None)
        if home is None:
            return index
        _take(home, part.wanted, -1)
    return len(parts) - 1


def _fits(wanted: Mapping[str, float], free: Mapping[str, float]) -> bool:
    return all(free.get(kind, 0.0) + 1e-9 >= amount for kind, amount in wanted.items())


def _take(node: dict[str, float], wanted: Mapping[str, float], sign: int) -> None:
    for kind, amount in wanted.items():
        node[kind] = node.get(kind, 0.0) + sign * amount


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
    return f"{shown}{more}. Ask for fewer processes, or lower max_colocate_count (CPUs each)."
