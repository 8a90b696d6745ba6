"""Join the results of calls of verl's groups, now or, for references of Ray, when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from quadriga.backends.ray.programs import all_references, is_reference
from quadriga.single_controller import batch_modes
from quadriga.single_controller.call import CallView, CollectFn, Collector, GroupView
from quadriga.single_controller.dispatch import PartScheme

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import Ref
    from quadriga.compat.verl.controller.futures import DataProtoFuture


def collect_later(collect_fn: CollectFn, view: GroupView, output: object) -> object:
    """Join results, or return a future of the batches that references of Ray name.

    The future has the references of the ranks that are collected. A collect function of the user's,
    and one that returns a list, receives all references.
    """
    plain = collect_fn.func if isinstance(collect_fn, partial) else collect_fn
    if plain in (batch_modes.collect_joined, batch_modes.collect_by_mesh) and is_reference(output):
        return _future(view, collect_fn, [output])  # of the one rank that runs the call
    if not all_references(output):
        return collect_fn(view, output)
    if plain is batch_modes.collect_joined:
        return _future(view, collect_fn, output)
    if plain is batch_modes.collect_by_mesh:
        (mesh_name,) = cast("partial[object]", collect_fn).args
        info = view.dispatch_info(mesh_name), view.collect_info(mesh_name)
        return _future_of_parts(view, *info, output)
    scheme: object = getattr(plain, "__self__", None)
    if isinstance(scheme, PartScheme) and plain == scheme.collect_batches:
        layout = view.rank_layout
        return _future_of_parts(view, scheme.parts(layout), scheme.collects(layout), output)
    return collect_fn(view, output)


def _future_of_parts(
    view: GroupView, part_of_rank: Sequence[int], collects: Sequence[bool], refs: Sequence[Ref]
) -> DataProtoFuture:
    """Return the future of one result per part, which also ends if another rank fails."""
    chosen = cast("dict[int, Ref]", batch_modes.select_parts(view, part_of_rank, collects, refs))
    known = {id(ref) for ref in chosen.values()}
    others = [ref for ref in refs if id(ref) not in known]
    return _future(view, partial(_join_parts, list(chosen)), list(chosen.values()), others)


def _join_parts(parts: list[int], view: GroupView, outputs: Sequence[object]) -> object:
    return batch_modes.join(view, outputs, parts)


def _future(
    view: GroupView, collect_fn: CollectFn, refs: Sequence[Ref], others: Sequence[Any] = ()
) -> DataProtoFuture:
    from quadriga.compat.verl.controller.futures import DataProtoFuture

    assert isinstance(view, CallView)
    return DataProtoFuture(Collector(collect_fn, view), list(refs), others=others)
