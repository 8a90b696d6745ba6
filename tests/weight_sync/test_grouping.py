"""HybridFlow's groupings: bytes that are counted equal the formulas of the paper's table 2."""

from __future__ import annotations

from fractions import Fraction

import pytest
from layout_cases import fsdp_layout

from quadriga.config.schema import EngineConfig
from quadriga.errors import ConfigError
from quadriga.parallel.layouts import (
    Degrees,
    Model,
    Stored,
    Weight,
    by_name,
    parallel_layout,
    replicated_layout,
)
from quadriga.weight_sync.planning.grouping import (
    HybridDegrees,
    copies_of_actor,
    generation_layout,
    groups_of_copies,
    peak_memory,
    redundancy,
    transition_volume,
)
from quadriga.weight_sync.planning.plan import plan

POWERS = (1, 2, 4, 8, 16)
LAYERS = 16


def model(stages):
    """16 layers with one weight, which tensor parallelism splits by rows or by columns."""
    weights = [Weight(f"{i}", (16, 1) if i % 2 else (1, 16)) for i in range(LAYERS)]
    stored = [
        Stored(w.name, (w.name,), 0 if w.shape[0] == 16 else 1, stage=i * stages // LAYERS)
        for i, w in enumerate(weights)
    ]
    return Model(by_name(weights), tuple(stored))


CASES = [
    HybridDegrees(t, p, d, t_g, p_g)
    for t in POWERS
    for p in POWERS
    for d in range(1, 17)
    for t_g in POWERS
    for p_g in POWERS
    if t * p * d <= 16 and t % t_g == 0 and p % p_g == 0
]


def training_and_generation(degrees, *, consecutive=False):
    training = parallel_layout(model(degrees.pipeline), degrees.training)
    stored = model(degrees.gen_pipeline).stored
    return training, generation_layout(
        stored, model(degrees.pipeline), degrees, consecutive=consecutive
    )


def test_all_degrees_up_to_16_ranks_are_tried():
    assert len(CASES) == 163


def test_strides_receive_the_volume_of_the_paper_and_hold_nothing_twice():
    for degrees in CASES:
        training, generation = training_and_generation(degrees)
        found = plan(training, generation)
        whole = training.num_bytes
        for rank in range(degrees.world_size):
            volume = transition_volume("hybridflow", degrees)
            assert found.received_bytes(rank) == volume * whole, (degrees, rank)
            held = found.received_bytes(rank) + training.own_bytes(rank)
            assert held == peak_memory("hybridflow", degrees) * whole, (degrees, rank)
            assert found.redundant_bytes(rank) == redundancy("hybridflow", degrees) == 0


def test_ranks_receive_only_from_their_micro_group():
    for degrees in CASES:
        groups = {rank: group for group in degrees.micro_groups() for rank in group}
        assert {len(group) for group in groups.values()} == {degrees.micro_replicas}
        pieces = plan(*training_and_generation(degrees)).link_bytes
        if degrees.replicas == 1:  # else another replica may have the same shard
            assert all(target in groups[source] for source, target in pieces)


def test_consecutive_ranks_hold_training_weights_beside():
    for degrees in (case for case in CASES if case.replicas == 1):
        training, generation = training_and_generation(degrees, consecutive=True)
        found = plan(training, generation)
        ranks = range(degrees.world_size)
        most = max(found.redundant_bytes(rank) for rank in ranks)
        # Each rank generates with its own training shard by itself if it generates with the whole
        # model, or if only complete stages are joined.
        contained = degrees.gen_model_parallel == 1 or (
            degrees.gen_tensor == degrees.tensor and degrees.gen_pipeline in (1, degrees.pipeline)
        )
        expected = 0 if contained else redundancy("hybridflow-v", degrees) * training.num_bytes
        assert most == expected, degrees
        # The engine gathers the whole model in each model-parallel group, then takes its part.
        gathered = plan(training, replicated_layout(training.weights.values(), ranks))
        volume = transition_volume("hybridflow-v", degrees)
        for rank in ranks:
            assert gathered.received_bytes(rank) == volume * training.num_bytes
        assert gathered.target.own_bytes(0) == peak_memory("hybridflow-v", degrees) * (
            training.num_bytes
        )


@pytest.mark.parametrize("degrees", CASES[::5])
def test_zero_gathers_the_whole_model_on_each_rank(degrees):
    world = degrees.world_size
    weights = [Weight("w", (world * 6, 3))]
    sharded = fsdp_layout(weights, world)
    gathered = plan(sharded, replicated_layout(weights, range(world)))
    for rank in range(world):
        volume = transition_volume("ds-chat", degrees)
        assert gathered.received_bytes(rank) == volume * sharded.num_bytes
        # A copy for training and one for generation, as the engine keeps them apart.
        assert sharded.own_bytes(rank) == redundancy("ds-chat", degrees) * sharded.num_bytes
    assert gathered.target.own_bytes(0) == peak_memory("ds-chat", degrees) * sharded.num_bytes


def test_the_example_of_the_paper():
    """Section 5.3: 8 ranks, training 1-4-2 (p-t-d), generation 1-2-2-2 (p_g-t_g-d_g-d)."""
    degrees = HybridDegrees(tensor=4, pipeline=1, replicas=2, gen_tensor=2)
    assert degrees.micro_replicas == 2
    assert degrees.generation_groups() == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert degrees.micro_groups() == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [transition_volume(d, degrees) for d in ("ds-chat", "hybridflow-v", "hybridflow")] == [
        Fraction(7, 8),
        Fraction(3, 4),
        Fraction(1, 4),
    ]
    assert [peak_memory(d, degrees) for d in ("ds-chat", "hybridflow-v", "hybridflow")] == [
        1,
        1,
        Fraction(1, 2),
    ]
    assert [redundancy(d, degrees) for d in ("ds-chat", "hybridflow-v", "hybridflow")] == [
        Fraction(1, 8),
        Fraction(1, 4),
        0,
    ]


def test_groups_with_stages():
    degrees = HybridDegrees(tensor=2, pipeline=4, replicas=1, gen_tensor=1, gen_pipeline=2)
    assert degrees.micro_groups() == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert degrees.generation_groups() == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert degrees.training == Degrees(tensor=2, pipeline=4)


@pytest.mark.parametrize("degrees", [(4, 1, 1, 3, 1), (2, 1, 1, 4, 1), (1, 2, 1, 1, 4)])
def test_degrees_that_do_not_divide_are_refused(degrees):
    with pytest.raises(ConfigError, match="must divide those of training"):
        HybridDegrees(*degrees)


def test_copies_have_strides_where_training_shards_are_then_parts_of_theirs():
    # Four tensor-parallel ranks, two replicas; two ranks generate together.
    assert groups_of_copies(4, 1, 8, 2) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    # Two stages: rank 0 and 4 have the first half of the rows of other layers.
    assert groups_of_copies(2, 2, 8, 2) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    # As many as train together are neighbours. So are those of a training without tensor ranks.
    assert groups_of_copies(2, 1, 4, 2) == [(0, 1), (2, 3)]
    assert groups_of_copies(1, 1, 4, 2) == groups_of_copies(2, 1, 4, 2)
    assert groups_of_copies(2, 1, 4, 4) == [(0, 1, 2, 3)]
    assert groups_of_copies(4, 2, 8, 1) == [(rank,) for rank in range(8)]


def test_copies_of_an_actor_have_strides_unless_fsdp_divides_tokens():
    def copies(**sizes):
        settings = {f"{name}_parallel_size": size for name, size in sizes.items()}
        return {
            name: copies_of_actor(EngineConfig(name=name, **settings), 8, 2)
            for name in ("fsdp", "megatron")
        }

    strides = [(0, 2), (1, 3), (4, 6), (5, 7)]
    neighbours = [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert copies(tensor=4) == {"fsdp": strides, "megatron": strides}
    # Tensor-parallel ranks of Megatron-core are neighbours, whatever else divides the tokens.
    assert copies(tensor=4, context=2) == {"fsdp": neighbours, "megatron": strides}
    assert copies(tensor=4, sequence=2)["fsdp"] == neighbours
