"""Layouts by hand: torch's chunks, tensor parallelism, fused projections, experts, adapters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from layout_cases import by_name, filled, fsdp_layout, values_of

from quadriga.errors import ShapeError
from quadriga.parallel.layouts import (
    Degrees,
    Model,
    Stored,
    Weight,
    parallel_layout,
    torch_chunk,
)


@pytest.mark.parametrize("size", range(9))
@pytest.mark.parametrize("parts", range(1, 7))
def test_chunks_are_those_of_torch(size, parts):
    expected = [c.tolist() for c in torch.chunk(torch.arange(size), parts)] if size else []
    found = [list(range(*torch_chunk(size, parts, i))) for i in range(parts)]
    assert found == expected + [[]] * (parts - len(expected))


def arrays_of(layout):
    return filled(layout, values_of(layout))


def test_fsdp_on_two_dimensions_repeats_the_shards():
    arrays = arrays_of(fsdp_layout([Weight("w", (5, 2)), Weight("s", ())], 2, 3))
    for rank in range(6):
        rows = np.arange(1, 11).reshape(5, 2)
        expected = rows[:3] if rank % 2 == 0 else rows[3:]
        assert np.array_equal(arrays[rank]["w"], expected)
        assert arrays[rank]["s"] == 11, "a weight without dimensions is whole everywhere"


def model(stored, *weights, tied=None):
    return Model(by_name(weights), stored, tied or {})


def test_tensor_parallel_splits_a_padded_dimension():
    found = parallel_layout(
        model((Stored("e", ("e",), 0, padded=8),), Weight("e", (6, 1))), Degrees(tensor=4)
    )
    assert [a["e"].ravel().tolist() for a in arrays_of(found).values()] == [
        [1, 2], [3, 4], [5, 6], [-1, -1],
    ]  # fmt: skip


QKV = (Weight("q", (8, 1)), Weight("k", (4, 1)), Weight("v", (4, 1)))


def test_fused_projections_on_one_rank_differ_in_order():
    rows = {}
    for fusion in ("parts", "query groups"):
        stored = Stored("qkv", ("q", "k", "v"), 0, fusion, (4, 2, 2))
        layout = parallel_layout(model((stored,), *QKV), Degrees())
        rows[fusion] = arrays_of(layout)[0]["qkv"].ravel().tolist()
    assert rows["parts"] == list(range(1, 17))
    assert rows["query groups"] == [1, 2, 3, 4, 9, 10, 13, 14, 5, 6, 7, 8, 11, 12, 15, 16]


def test_key_heads_are_repeated_where_there_are_more_ranks():
    stored = Stored("qkv", ("q", "k", "v"), 0, "parts", (4, 2, 2))
    found = arrays_of(parallel_layout(model((stored,), *QKV), Degrees(tensor=4)))
    assert [found[rank]["qkv"].ravel().tolist() for rank in range(4)] == [
        [1, 2, 9, 10, 13, 14], [3, 4, 9, 10, 13, 14],
        [5, 6, 11, 12, 15, 16], [7, 8, 11, 12, 15, 16],
    ]  # fmt: skip


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
