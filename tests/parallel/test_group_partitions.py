"""Partitions of prompt groups: every row once, equal counts, groups whole where they fit."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from quadriga.parallel.balancing import RowCosts, arrange_rows, partition_groups
from quadriga.parallel.costs import TOKENS, AttentionCost, CostModel

MODEL = CostModel(token=3.0, output=2.0, attention=(AttentionCost(0.1),))


def costs_of(
    sizes: list[int], prompt: list[int], response: list[int], live: list[bool] | None = None
) -> RowCosts:
    """Groups of `sizes` neighbouring rows; `prompt` has one entry per group."""
    group = np.repeat(np.arange(len(sizes)), sizes)
    return RowCosts.of(
        MODEL, group, np.array(prompt)[group], np.array(response),
        None if live is None else np.array(live),
    )  # fmt: skip


@st.composite
def batches(draw: st.DrawFn) -> tuple[RowCosts, list[int]]:
    """Costs of rows in uneven groups, some of them not live."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    count = sum(sizes)
    prompt = draw(st.lists(st.integers(1, 300), min_size=len(sizes), max_size=len(sizes)))
    response = draw(st.lists(st.integers(1, 90), min_size=count, max_size=count))
    live = draw(st.lists(st.sampled_from([True, True, False]), min_size=count, max_size=count))
    return costs_of(sizes, prompt, response, live), sizes


def ranks_of_groups(costs: RowCosts, parts: list[list[int]]) -> list[int]:
    """The number of parts that compute each prompt group."""
    found: dict[int, set[int]] = {}
    for number, part in enumerate(parts):
        for row in part:
            if costs.live[row]:
                found.setdefault(int(costs.group[row]), set()).add(number)
    return [len(ranks) for ranks in found.values()]


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 8))
def test_every_row_is_in_one_partition_and_the_counts_are_equal(batch, parts) -> None:
    costs, _ = batch
    partitions = partition_groups(costs, range(len(costs)), parts)
    assert len(partitions) == parts
    assert sorted(itertools.chain(*partitions)) == list(range(len(costs)))
    assert max(map(len, partitions)) <= -(-len(costs) // parts)
    if len(costs) % parts == 0:
        assert {len(part) for part in partitions} == {len(costs) // parts}
    assert partitions == partition_groups(costs, range(len(costs)), parts)


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 8))
def test_groups_are_split_only_if_they_do_not_fit(batch, parts) -> None:
    """Whole if every partition has enough slots for the largest group. Otherwise a split needs a
    partition that is full, so there are fewer pieces than groups and partitions together."""
    costs, _ = batch
    rows = range(len(costs))
    groups = costs.groups(rows)
    pieces = ranks_of_groups(costs, partition_groups(costs, rows, parts))
    slots = -(-len(costs) // parts) // max(map(len, groups), default=1)
    if len(groups) <= slots * parts:
        assert set(pieces) <= {1}
    assert sum(pieces) <= len(groups) + parts - 1


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 8))
def test_rows_of_a_group_are_neighbours_and_rows_without_targets_come_last(batch, parts) -> None:
    costs, _ = batch
    for part in partition_groups(costs, range(len(costs)), parts):
        live = [bool(costs.live[row]) for row in part]
        assert live == sorted(live, reverse=True)
        groups = [int(costs.group[row]) for row in part if costs.live[row]]
        assert len(list(itertools.groupby(groups))) == len(set(groups))


def test_the_cost_of_rows_counts_each_prompt_once_and_rows_that_are_not_live_never() -> None:
    costs = costs_of([2, 2], [10, 100], [1, 2, 3, 4], [True, True, True, False])
    own = MODEL.of_responses(np.array([10, 10, 100]), np.array([1, 2, 3]))
    shared = MODEL.of_prompts(np.array([10, 100]))
    assert costs.total([0, 1]) == pytest.approx(own[0] + own[1] + shared[0])
    assert costs.total([0, 2, 3]) == pytest.approx(own[0] + own[2] + shared.sum())
    assert costs.total([3]) == 0.0
    assert costs.groups([3, 2, 1, 0]) == [[2], [1, 0]]


def test_equal_groups_are_balanced_by_cost() -> None:
    lengths = np.random.default_rng(0).lognormal(4.5, 0.8, 128 * 8).astype(int) + 1
    costs = costs_of([8] * 128, [512] * 128, lengths.tolist())
    parts = partition_groups(costs, range(len(costs)), 8)
    assert set(ranks_of_groups(costs, parts)) == {1}
    totals = [costs.total(part) for part in parts]
    assert max(totals) <= 1.001 * sum(totals) / 8


def test_the_example_in_the_code() -> None:
    """Three groups of four rows on two ranks: two groups stay whole, the cheapest is split."""
    costs = costs_of([4, 4, 4], [10, 10, 2], [5] * 12)
    parts = partition_groups(costs, range(12), 2)
    assert [[row // 4 for row in part] for part in parts] == [[0] * 4 + [2] * 2, [1] * 4 + [2] * 2]


def test_a_group_larger_than_a_partition_is_split_into_pieces_with_long_and_short_rows() -> None:
    costs = costs_of([8], [10], [1, 2, 3, 4, 50, 60, 70, 80])
    parts = partition_groups(costs, range(8), 2)
    assert [len(part) for part in parts] == [4, 4]
    assert all(min(part) < 4 <= max(part) for part in parts)


def test_rows_without_targets_fill_partitions_up_and_do_not_count() -> None:
    """Two of four groups are masked: each rank computes one group, and has two groups of rows."""
    live = [True] * 2 + [False] * 4 + [True] * 2
    costs = costs_of([2] * 4, [10] * 4, [5] * 8, live)
    parts = partition_groups(costs, range(8), 2)
    assert sorted(map(tuple, parts)) == [(0, 1, 2, 3), (6, 7, 4, 5)]
    nothing = costs_of([2] * 2, [10] * 2, [5] * 4, [False] * 4)
    assert partition_groups(nothing, range(4), 2) == [[0, 1], [2, 3]]


def test_each_mini_batch_is_balanced_by_itself_and_holds_the_same_rows_on_any_ranks() -> None:
    """The first mini-batch has the long prompts. Balanced over the whole batch, one rank could have
    all of them."""
    costs = costs_of([2] * 8, [400] * 4 + [10] * 4, [5] * 16)
    for ranks in (1, 2, 4):
        arranged = arrange_rows(costs, ranks, 8)
        for block in range(2):
            rows = [arranged[rank][block] for rank in range(ranks)]
            assert sorted(itertools.chain(*rows)) == list(range(8 * block, 8 * block + 8))
            assert len({costs.total(part) for part in rows}) == 1
    whole = arrange_rows(costs, 2, None)
    assert [len(blocks) for blocks in whole] == [1, 1]


def test_a_last_mini_batch_may_be_smaller() -> None:
    costs = costs_of([2] * 3, [10] * 3, [5] * 6)
    assert arrange_rows(costs, 2, 4) == [[[0, 1], [4]], [[2, 3], [5]]]


def test_without_shared_prompts_rows_are_balanced_one_by_one() -> None:
    response = np.array([50, 40, 30, 20, 10, 30])
    costs = RowCosts.of(TOKENS, np.arange(6), np.full(6, 10), response)
    parts = partition_groups(costs, range(6), 2)
    assert [costs.total(part) for part in parts] == [120, 120]
