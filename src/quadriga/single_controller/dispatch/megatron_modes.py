"""The MEGATRON family of dispatch modes, driven by a registered `RankLayout`.

| mode | part of a rank | collected from |
|---|---|---|
| MEGATRON_COMPUTE(_PROTO) | dp rank | tp 0, last pp, cp 0 of each dp rank |
| MEGATRON_PP_AS_DP(_PROTO) | dp rank, pp rank counted as more dp ranks | tp 0, cp 0 |
| MEGATRON_PP_ONLY | everything to all | one per pp stage: tp 0, dp 0, cp 0 |
"""

from __future__ import annotations

from typing import Any

from quadriga.errors import DispatchError, LengthError
from quadriga.single_controller.call import GroupView
from quadriga.single_controller.dispatch.batch_parts import join
from quadriga.single_controller.dispatch.mesh_modes import by_part, pick
from quadriga.single_controller.dispatch.modes import DispatchMode
from quadriga.single_controller.placement.rank_layout import GroupLayout

Split = tuple[tuple[Any, ...], dict[str, Any]]


def dp_parts(layout: GroupLayout) -> list[int]:
    """For each rank its data-parallel rank."""
    return [rank.dp_rank for rank in layout.ranks]


def dp_collects(layout: GroupLayout) -> list[bool]:
    """tp 0, cp 0, last pipeline stage."""
    last = layout.pp_size - 1
    return [r.tp_rank == 0 and r.cp_rank == 0 and r.pp_rank == last for r in layout.ranks]


def pp_as_dp_parts(layout: GroupLayout) -> list[int]:
    """For each rank `dp · PP + pp`: the stages of one replica hold neighbouring parts."""
    return [rank.dp_rank * layout.pp_size + rank.pp_rank for rank in layout.ranks]


def pp_as_dp_collects(layout: GroupLayout) -> list[bool]:
    """tp 0, cp 0."""
    return [rank.tp_rank == 0 and rank.cp_rank == 0 for rank in layout.ranks]


def dispatch_dp_batches(view: GroupView, *args: Any, **kwargs: Any) -> Split:
    """Batches split by data-parallel rank."""
    return by_part(view, dp_parts(view.rank_layout), args, kwargs)


def collect_dp_batches(view: GroupView, outputs: Any) -> Any:
    """Joined in data-parallel order."""
    return join(view, collect_dp_list(view, outputs))


def dispatch_dp_lists(view: GroupView, *args: Any, **kwargs: Any) -> Split:
    """Lists with one entry per data-parallel rank."""
    return _lists(view, dp_parts(view.rank_layout), args, kwargs)


def collect_dp_list(view: GroupView, outputs: Any) -> list[Any]:
    """One result per data-parallel rank."""
    return pick(view, dp_parts(view.rank_layout), dp_collects(view.rank_layout), outputs)


def dispatch_pp_as_dp_batches(view: GroupView, *args: Any, **kwargs: Any) -> Split:
    """Batches split over data-parallel ranks times pipeline stages."""
    return by_part(view, pp_as_dp_parts(view.rank_layout), args, kwargs)


def collect_pp_as_dp_batches(view: GroupView, outputs: Any) -> Any:
    """Joined in the order of dispatch."""
    return join(view, collect_pp_as_dp_list(view, outputs))


def dispatch_pp_as_dp_lists(view: GroupView, *args: Any, **kwargs: Any) -> Split:
    """Lists with one entry per data-parallel rank and stage."""
    return _lists(view, pp_as_dp_parts(view.rank_layout), args, kwargs)


def collect_pp_as_dp_list(view: GroupView, outputs: Any) -> list[Any]:
    """One result per data-parallel rank and stage."""
    layout = view.rank_layout
    return pick(view, pp_as_dp_parts(layout), pp_as_dp_collects(layout), outputs)


def dispatch_all(view: GroupView, *args: Any, **kwargs: Any) -> Split:
    """The same argument for every rank."""
    n = len(view.ranks)
    return tuple([a] * n for a in args), {name: [a] * n for name, a in kwargs.items()}


def collect_pp_stages(view: GroupView, outputs: Any) -> list[Any]:
    """One result per pipeline stage, first stage first."""
    layout = view.rank_layout
    stages = [rank.pp_rank for rank in layout.ranks]
    first = [r.tp_rank == 0 and r.dp_rank == 0 and r.cp_rank == 0 for r in layout.ranks]
    return pick(view, stages, first, outputs)


def _lists(
    view: GroupView, part_of_rank: list[int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Split:
    parts = max(part_of_rank) + 1

    def spread(where: str, value: Any) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise DispatchError(
                f"{view.method}: {where} must be a list with one entry per part ({parts}), got "
                f"{type(value).__name__}."
            )
        if len(value) != parts:
            raise LengthError(f"{view.method}: {where} has {len(value)} entries for {parts} parts.")
        return [value[part_of_rank[rank]] for rank in view.ranks]

    return (
        tuple(spread(f"argument {i}", a) for i, a in enumerate(args)),
        {name: spread(f"argument {name!r}", a) for name, a in kwargs.items()},
    )


MODES = (
    DispatchMode("MEGATRON_COMPUTE", dispatch_dp_lists, collect_dp_list),
    DispatchMode("MEGATRON_COMPUTE_PROTO", dispatch_dp_batches, collect_dp_batches),
    DispatchMode("MEGATRON_PP_AS_DP", dispatch_pp_as_dp_lists, collect_pp_as_dp_list),
    DispatchMode("MEGATRON_PP_AS_DP_PROTO", dispatch_pp_as_dp_batches, collect_pp_as_dp_batches),
    DispatchMode("MEGATRON_PP_ONLY", dispatch_all, collect_pp_stages),
)
