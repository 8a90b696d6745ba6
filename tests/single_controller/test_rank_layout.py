"""Rank coordinates, compared with layouts written out by hand."""

from __future__ import annotations

import pytest

from quadriga.errors import MeshError
from quadriga.single_controller import GroupLayout, RankLayout


def layouts(tp=1, cp=1, dp=1, pp=1):
    n = tp * cp * dp * pp
    return GroupLayout.of([RankLayout.of_rank(r, tp, cp, dp, pp) for r in range(n)])


def test_tp_is_innermost_and_pp_outermost():
    places = [(r.tp_rank, r.dp_rank, r.pp_rank) for r in layouts(tp=2, dp=2, pp=2).ranks]
    assert places == [
        (0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0),
        (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1),
    ]  # fmt: skip


def test_context_parallel_ranks_receive_the_same_part():
    layout = layouts(tp=1, cp=2, dp=2)
    assert layout.dp_parts == [0, 0, 1, 1]
    assert layout.dp_collects == [True, False, True, False]


def test_pipeline_stages_as_data_parallel_ranks():
    layout = layouts(tp=2, dp=2, pp=2)
    assert layout.pp_as_dp_parts == [0, 0, 2, 2, 1, 1, 3, 3]
    assert layout.pp_as_dp_collects == [True, False] * 4


def test_inconsistent_layouts_are_refused():
    with pytest.raises(MeshError, match="tp=2 × cp=1 × dp=2 × pp=1 = 4 ranks"):
        RankLayout.of_rank(4, tp=2, dp=2)
    with pytest.raises(MeshError, match="tp_rank must lie"):
        RankLayout(2, 0, 0, 0, tp_size=2)
    with pytest.raises(MeshError, match="different layouts"):
        GroupLayout.of([RankLayout.of_rank(0, tp=2), RankLayout.of_rank(1, dp=2)])
    with pytest.raises(MeshError, match="with 1 different"):
        GroupLayout.of([RankLayout.of_rank(0, tp=2)] * 2)
