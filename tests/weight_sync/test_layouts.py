"""Layouts by hand: tensor parallelism, fused projections, experts, adapters."""

import pytest
from layout_cases import by_name, filled, values_of

from quadriga.errors import ShapeError
from quadriga.parallel.layouts import Degrees, Model, Stored, Weight, parallel_layout


def arrays_of(layout):
    return filled(layout, values_of(layout))


def model(stored, *weights):
    return Model(by_name(weights), stored)


def test_tensor_parallel_splits_a_padded_dimension():
    found = parallel_layout(
        model((Stored("e", ("e",), 0, padded=8),), Weight("e", (6, 1))), Degrees(tensor=4)
    )
    assert [a["e"].ravel().tolist() for a in arrays_of(found).values()] == [
        [1, 2], [3, 4], [5, 6], [-1, -1],
    ]  # fmt: skip


QKV = (Weight("q", (8, 1)), Weight("k", (4, 1)), Weight("v", (4, 1)))


@pytest.mark.parametrize(("groups", "rows"), [
    (0, [*range(1, 17)]),
    (2, [1, 2, 3, 4, 9, 10, 13, 14, 5, 6, 7, 8, 11, 12, 15, 16]),
])  # fmt: skip
def test_fused_projections_differ_in_order(groups, rows):
    layout = parallel_layout(model((Stored("qkv", ("q", "k", "v"), 0, groups),), *QKV), Degrees())
    assert arrays_of(layout)[0]["qkv"].ravel().tolist() == rows


def test_stages_and_experts_are_on_their_ranks():
    stored = [Stored(f"e{e}", (f"e{e}",), stage=1, expert=e) for e in range(4)]
    stored += [Stored("first", ("first",), stage=0), Stored("every", ("every",))]
    weights = [Weight(s.weights[0], (1,)) for s in stored]
    found = parallel_layout(model(tuple(stored), *weights), Degrees(expert=2, pipeline=2))
    names = {rank: [t.name for t in tensors] for rank, tensors in found.ranks.items()}
    assert names == {
        0: ["first", "every"],
        1: ["first", "every"],
        2: ["e0", "e1", "every"],
        3: ["e2", "e3", "every"],
    }


def test_a_dimension_that_does_not_divide_is_refused():
    with pytest.raises(ShapeError, match="6 indices of dimension 0 do not divide by 4"):
        parallel_layout(model((Stored("e", ("e",), 0),), Weight("e", (6,))), Degrees(tensor=4))
