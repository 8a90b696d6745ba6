"""Mesh dispatch: batches split by the data-parallel rank of a named mesh.

A worker says of each of its meshes which data-parallel rank it has and whether its result counts
(`Worker._register_dispatch_collect_info`). Ranks that share a data-parallel rank get one and the
same part, which the group sends once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from quadriga.errors import MeshError
from quadriga.single_controller.call import GroupView
from quadriga.single_controller.dispatch.batch_parts import join, split_arguments

Split = tuple[tuple[Any, ...], dict[str, Any]]


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Any]:
    """The dispatch mode of a mesh, for `@register(dispatch_mode=...)`."""
    return {
        "dispatch_fn": partial(dispatch_by_mesh, mesh_name),
        "collect_fn": partial(collect_by_mesh, mesh_name),
    }


def dispatch_by_mesh(mesh_name: str, view: GroupView, *args: Any, **kwargs: Any) -> Split:
    """Split every batch by data-parallel rank; anything else goes to all."""
    view.collect_info(mesh_name)
    return by_part(view, view.dispatch_info(mesh_name), args, kwargs)


def by_part(
    view: GroupView, part_of_rank: Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Split:
    """Split batches into max(part_of_rank) + 1 parts and hand rank r the part of its number."""
    if not args and not kwargs:
        return (), {}
    parts = max(part_of_rank) + 1
    split_args, split_kwargs = split_arguments(view, args, kwargs, parts)
    mine = [part_of_rank[rank] for rank in view.ranks]
    return (
        tuple([pieces[part] for part in mine] for pieces in split_args),
        {name: [pieces[part] for part in mine] for name, pieces in split_kwargs.items()},
    )


def collect_by_mesh(mesh_name: str, view: GroupView, outputs: Any) -> Any:
    """Join what the collecting ranks returned, in data-parallel order."""
    if not isinstance(outputs, list):
        return outputs
    return join(
        view, pick(view, view.dispatch_info(mesh_name), view.collect_info(mesh_name), outputs)
    )


def pick(
    view: GroupView, part_of_rank: Sequence[int], collects: Sequence[bool], outputs: list[Any]
) -> list[Any]:
    """The outputs of collecting ranks, one per part, in the order of the parts."""
    chosen: dict[int, Any] = {}
    for rank, output in zip(view.ranks, outputs, strict=True):
        if not collects[rank]:
            continue
        part = part_of_rank[rank]
        if part in chosen:
            raise MeshError(
                f"{view.method}: two ranks collect for data-parallel rank {part}. Exactly one "
                "rank of those that share it may register is_collect=True."
            )
        chosen[part] = output
    return [chosen[part] for part in sorted(chosen)]


def check_mesh(mesh_name: str, dp_ranks: Sequence[int], collects: Sequence[bool]) -> None:
    """Raises MeshError unless the dp ranks are 0..n-1 without a hole, each collected by one rank
    at most, and some rank collects."""
    expected = set(range(max(dp_ranks) + 1))
    if set(dp_ranks) != expected:
        raise MeshError(
            f"Mesh {mesh_name!r}: data-parallel ranks must cover 0..{max(dp_ranks)}, the workers "
            f"registered {list(dp_ranks)}.",
            mesh_name=mesh_name,
        )
    collected = [dp for dp, is_collect in zip(dp_ranks, collects, strict=True) if is_collect]
    if not collected or len(set(collected)) != len(collected):
        raise MeshError(
            f"Mesh {mesh_name!r}: each data-parallel rank may be collected from one rank, and at "
            f"least one must be; the collecting ranks registered {collected}.",
            mesh_name=mesh_name,
        )
