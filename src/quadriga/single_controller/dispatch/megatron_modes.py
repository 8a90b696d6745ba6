"""The MEGATRON dispatch modes, which split by the `RankLayout` that the workers registered.

| mode | part of a rank | results from |
|---|---|---|
| MEGATRON_COMPUTE(_PROTO) | dp rank | tp 0, cp 0, last pp of each dp rank |
| MEGATRON_PP_AS_DP(_PROTO) | dp rank · pp size + pp rank | tp 0, cp 0 |
| MEGATRON_PP_ONLY | all ranks receive the same | one per pp stage: tp 0, cp 0, dp 0 |

Example: 8 ranks with tp=2, dp=2, pp=2. tp is innermost and pp outermost, and * marks the ranks
whose results are collected:

                     MEGATRON_COMPUTE        MEGATRON_PP_AS_DP
                     dp 0       dp 1         dp 0       dp 1
    stage 0  ranks   0  1       2  3         0* 1       2* 3
             part    0  0       1  1         0  0       2  2
    stage 1  ranks   4* 5       6* 7         4* 5       6* 7
             part    0  0       1  1         1  1       3  3

MEGATRON_PP_AS_DP joins parts 0, 1, 2, 3, which come from ranks 0, 4, 2, 6: the stages of one model
replica hold adjacent parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quadriga.errors import DispatchError, LengthError
from quadriga.single_controller.call import Arguments, GroupView, KeywordArguments, Split
from quadriga.single_controller.dispatch.batch_modes import (
    join_parts,
    select_parts,
    split_by_part,
)
from quadriga.single_controller.dispatch.modes import DispatchMode, dispatch_one_to_all
from quadriga.single_controller.placement.rank_layout import GroupLayout


def dp_parts(layout: GroupLayout) -> list[int]:
    """Return the data-parallel rank of each rank."""
    return [rank.dp_rank for rank in layout.ranks]


def dp_collects(layout: GroupLayout) -> list[bool]:
    """Return for each rank whether it is tp 0, cp 0 of the last pipeline stage."""
    last = layout.pp_size - 1
    return [r.tp_rank == 0 and r.cp_rank == 0 and r.pp_rank == last for r in layout.ranks]


def pp_as_dp_parts(layout: GroupLayout) -> list[int]:
    """Return `dp rank · pp size + pp rank` of each rank."""
    return [rank.dp_rank * layout.pp_size + rank.pp_rank for rank in layout.ranks]


def pp_as_dp_collects(layout: GroupLayout) -> list[bool]:
    """Return for each rank whether it is tp 0, cp 0."""
    return [rank.tp_rank == 0 and rank.cp_rank == 0 for rank in layout.ranks]


@dataclass(frozen=True)
class PartScheme:
    """Which part of the arguments each rank receives, and which ranks' results are collected.

    Attributes:
        parts: the number of each rank's part.
        collects: for each rank, whether its result is collected.
    """

    parts: Callable[[GroupLayout], list[int]]
    collects: Callable[[GroupLayout], list[bool]]

    def dispatch_batches(self, view: GroupView, /, *args: object, **kwargs: object) -> Split:
        """Split batches into as many parts as the scheme has."""
        return split_by_part(view, self.parts(view.rank_layout), args, kwargs)

    def collect_batches(self, view: GroupView, outputs: Sequence[object]) -> object:
        """Join one batch per part, in the order of dispatch."""
        layout = view.rank_layout
        return join_parts(view, self.parts(layout), self.collects(layout), outputs)

    def dispatch_lists(self, view: GroupView, /, *args: object, **kwargs: object) -> Split:
        """Take lists with one entry per part."""
        return _lists(view, self.parts(view.rank_layout), args, kwargs)

    def collect_list(self, view: GroupView, outputs: Sequence[object]) -> list[object]:
        """Return one result per part."""
        layout = view.rank_layout
        return _selected(view, self.parts(layout), self.collects(layout), outputs)


DP = PartScheme(dp_parts, dp_collects)
PP_AS_DP = PartScheme(pp_as_dp_parts, pp_as_dp_collects)


def collect_pp_stages(view: GroupView, outputs: Sequence[object]) -> list[object]:
    """Return one result per pipeline stage, first stage first."""
    layout = view.rank_layout
    stages = [rank.pp_rank for rank in layout.ranks]
    first = [r.tp_rank == 0 and r.dp_rank == 0 and r.cp_rank == 0 for r in layout.ranks]
    return _selected(view, stages, first, outputs)


def _selected(
    view: GroupView, parts: list[int], collects: list[bool], outputs: Sequence[object]
) -> list[object]:
    return list(select_parts(view, parts, collects, outputs).values())


def _lists(
    view: GroupView, part_of_rank: list[int], args: Arguments, kwargs: KeywordArguments
) -> Split:
    parts = max(part_of_rank) + 1

    def entries(where: str, value: object) -> list[object]:
        if not isinstance(value, list | tuple):
            raise DispatchError(
                f"{view.method}: {where} must be a list with one entry per part ({parts}), got "
                f"{type(value).__name__}."
            )
        if len(value) != parts:
            raise LengthError(f"{view.method}: {where} has {len(value)} entries for {parts} parts.")
        return [value[part_of_rank[rank]] for rank in view.ranks]

    return (
        tuple(entries(f"argument {i}", a) for i, a in enumerate(args)),
        {name: entries(f"argument {name!r}", a) for name, a in kwargs.items()},
    )


MODES = (
    DispatchMode("MEGATRON_COMPUTE", DP.dispatch_lists, DP.collect_list),
    DispatchMode("MEGATRON_COMPUTE_PROTO", DP.dispatch_batches, DP.collect_batches),
    DispatchMode("MEGATRON_PP_AS_DP", PP_AS_DP.dispatch_lists, PP_AS_DP.collect_list),
    DispatchMode("MEGATRON_PP_AS_DP_PROTO", PP_AS_DP.dispatch_batches, PP_AS_DP.collect_batches),
    DispatchMode("MEGATRON_PP_ONLY", dispatch_one_to_all, collect_pp_stages),
)
