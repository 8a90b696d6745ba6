"""Plans: each element is written once, from an owner; buffers and bytes are those of the plan."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from layout_cases import Ranks, by_name, filled, pairs, replicated_layout, values_of

from quadriga.config.schema import EngineConfig
from quadriga.errors import WorkerError
from quadriga.parallel.layouts import (
    Degrees,
    Layout,
    Model,
    Piece,
    Stored,
    StoredTensor,
    Weight,
    count,
    difference,
    intersection,
    parallel_layout,
    split,
)
from quadriga.weight_sync.plan import Plan, canonical_boxes, plan
from quadriga.workers.runtime import groups_of_copies

MANY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def received(found: Plan, rank: int) -> int:
    return sum(size for (_, target), size in found.link_bytes.items() if target == rank)


def check_plan(source: Layout, target: Layout, bucket_bytes: int) -> None:
    found = plan(source, target)
    ranks = Ranks(found).run(bucket_bytes)
    expected = filled(target, values_of(source))
    for rank, arrays in expected.items():
        for name, array in arrays.items():
            assert np.array_equal(ranks.target[rank][name], array), (rank, name)
            # Once, and padding never.
            assert np.array_equal(ranks.writes[rank][name], (array != -1).astype(int)), (rank, name)
    for rank in ranks.peak:
        assert ranks.peak[rank] <= bucket_bytes
        assert ranks.received[rank] == received(found, rank)


@given(pairs(), st.sampled_from([64, 500, 4000, 1 << 20]))
@MANY
def test_each_element_is_written_once_from_an_owner(layouts, bucket_bytes):
    check_plan(*layouts, bucket_bytes)


@given(pairs())
@MANY
def test_no_rank_receives_what_it_stores(layouts):
    source, target = layouts
    for transfer in plan(source, target).transfers:
        if not transfer.is_local and transfer.target in source.ranks:
            own = (p for t in source.ranks[transfer.target] for p in t.pieces)
            boxes = [p.box for p in own if p.weight == transfer.weight]
            assert all(intersection(transfer.box, box) is None for box in boxes)


@given(pairs())
@MANY
def test_canonical_boxes_have_each_element_once(layouts):
    source, _ = layouts
    values = values_of(source)
    arrays = filled(source, values)
    seen = {name: np.zeros_like(array) for name, array in values.items()}
    for rank, boxes in canonical_boxes(source).items():
        for name, box, slot in boxes:
            index = tuple(slice(*span) for span in box)
            stored = arrays[rank][slot.tensor][tuple(slice(*span) for span in slot.box)]
            assert np.array_equal(stored, values[name][index])
            seen[name][index] += 1
    assert all((array == 1).all() for array in seen.values())


def test_senders_are_balanced():
    """8 ranks have every weight; 24 others want them: 3 of 8 shares each."""
    weights = [Weight(f"w{i}", (64, 8)) for i in range(16)]
    found = plan(replicated_layout(weights, range(8)), replicated_layout(weights, range(8, 32)))
    sent = Counter()
    for (source, _), size in found.link_bytes.items():
        sent[source] += size
    assert sent == dict.fromkeys(range(8), 3 * 16 * 64 * 8 * 4)


def test_owners_on_the_node_of_the_target_are_preferred():
    weights = [Weight("w", (6, 2))]
    source = replicated_layout(weights, range(2))
    target = replicated_layout(weights, (2, 3))
    nodes = {0: "a", 1: "b", 2: "b", 3: "b"}
    assert plan(source, target, nodes).link_bytes == {(1, 2): 48, (1, 3): 48}
    assert plan(source, target).link_bytes == {(0, 2): 48, (1, 3): 48}


@pytest.mark.parametrize(
    ("sizes", "fsdp", "megatron"),
    [
        # Four tensor-parallel ranks, two replicas; two ranks generate together.
        ({"tensor": 4}, "strides", "strides"),
        # As many as generate together are neighbours. So are those without tensor-parallel ranks.
        ({"tensor": 2}, "neighbours", "neighbours"),
        ({}, "neighbours", "neighbours"),
        # Tensor-parallel ranks of Megatron-core are neighbours, whatever else divides the tokens.
        ({"tensor": 4, "context": 2}, "neighbours", "strides"),
    ],
)
def test_copies_have_strides_where_training_shards_are_then_parts_of_theirs(sizes, fsdp, megatron):
    expected = {
        "strides": [(0, 2), (1, 3), (4, 6), (5, 7)],
        "neighbours": [(0, 1), (2, 3), (4, 5), (6, 7)],
    }
    settings = {f"{name}_parallel_size": size for name, size in sizes.items()}
    for name, groups in {"fsdp": fsdp, "megatron": megatron}.items():
        engine = EngineConfig(name=name, **settings)
        assert groups_of_copies(engine, 8, 2) == expected[groups]
        assert groups_of_copies(engine, 8, 1) == [(rank,) for rank in range(8)]
    assert groups_of_copies(None, 4, 4) == [(0, 1, 2, 3)]


def test_copies_with_strides_receive_the_volume_of_the_paper():
    """HybridFlow, table 2: (tp - t_g) / (t_g tp) M, and nothing that is held is left out."""
    weights = by_name([Weight("rows", (16, 1)), Weight("columns", (1, 16))])
    stored = (Stored("rows", ("rows",), 0), Stored("columns", ("columns",), 1))
    training = parallel_layout(Model(weights, stored), Degrees(tensor=4))
    halves = parallel_layout(Model(weights, stored), Degrees(tensor=2)).ranks
    groups = groups_of_copies(EngineConfig(tensor_parallel_size=4), 4, 2)
    held = {rank: halves[i] for group in groups for i, rank in enumerate(group)}
    found = plan(training, Layout(weights, held))
    assert [received(found, rank) for rank in range(4)] == [32 * 4 * 2 // 8] * 4


def test_a_weight_that_nobody_stores_is_named():
    weights = by_name([Weight("a", (4,)), Weight("b", (4,)), Weight("c", (4,))])
    half = StoredTensor("b", (2,), (Piece("b", ((0, 2),), ((0, 2),)),))
    a = replicated_layout([weights["a"]], [0]).ranks[0]
    with pytest.raises(WorkerError, match="'b', 'c'") as caught:
        plan(Layout(weights, {0: (*a, half)}), replicated_layout(weights.values(), [1]))
    assert caught.value.tensors == ("b", "c")


def boxes(dims):
    span = st.tuples(st.integers(0, 6), st.integers(1, 5)).map(lambda s: (s[0], s[0] + s[1]))
    return st.lists(span, min_size=dims, max_size=dims).map(tuple)


@given(st.integers(0, 3).flatmap(lambda d: st.tuples(boxes(d), boxes(d))), st.integers(1, 40))
@MANY
def test_boxes_are_cut_into_all_their_elements(two, limit):
    def paint(parts):
        canvas = np.zeros((12,) * len(two[0]), dtype=int)
        for part in parts:
            canvas[tuple(slice(*span) for span in part)] += 1
        return canvas

    a, b = two
    common = intersection(a, b)
    if common is not None:
        assert np.array_equal(paint([common, *difference(a, common)]), paint([a]))
        assert np.array_equal(paint([common]), paint([a]) & paint([b]))
    else:
        assert not (paint([a]) & paint([b])).any()
    parts = list(split(a, limit))
    assert np.array_equal(paint(parts), paint([a]))
    assert all(count(part) <= limit for part in parts)
