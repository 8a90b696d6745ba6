"""Micro-batches stay within the budget of computed tokens, and keep prompt groups whole."""

from unittest import mock

import pytest
import torch

from quadriga.config.schema import EngineConfig
from quadriga.engines import base
from quadriga.engines.micro_batches import plan_micro_batches, select_rows
from quadriga.parallel.costs import TOKENS, AttentionCost, CostModel
from quadriga.parallel.packing import left_align, pack_rows
from row_cases import rows_of


def planned_by(settings, batch, size=None):
    """The micro-batches of an engine with these settings, which has no model."""
    engine = mock.Mock(base.TrainEngine, config=settings, cost=TOKENS, stages=1, round_size=1)
    engine.device = torch.device("cpu")
    return base.TrainEngine.micro_batches(engine, batch, micro_batch_size=size)


def computed_tokens(batch, micro_batches, *, packed: bool) -> list[int]:
    parts = [select_rows(batch, rows, torch.device("cpu")).values() for rows in micro_batches]
    return [
        (pack_rows(*part).input_ids if packed else left_align(*part)[0]).numel() for part in parts
    ]


def test_example_in_the_code():
    batch = rows_of([(0, 4, 3), (0, 4, 2), (1, 4, 1), (0, 4, 4)])
    micro_batches = plan_micro_batches(batch, size=None, max_tokens=12, share_prompts=True)
    assert [rows.tolist() for rows in micro_batches] == [[0, 1], [3], [2]]
    assert computed_tokens(batch, micro_batches, packed=True) == [9, 8, 5]


def test_padding_counts_where_rows_are_padded():
    batch = rows_of([(0, 1, 1), (1, 3, 3), (2, 1, 1), (3, 3, 2), (4, 1, 0), (5, 1, 1)])
    micro_batches = plan_micro_batches(batch, size=None, max_tokens=12, share_prompts=False)
    assert [rows.tolist() for rows in micro_batches] == [[1, 3], [0, 2, 5]]
    assert computed_tokens(batch, micro_batches, packed=False) == [12, 6]


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_no_micro_batch_exceeds_the_budget(packed, seed, size):
    random = torch.Generator().manual_seed(seed)

    def draw(last: int) -> int:
        return int(torch.randint(1, last, (1,), generator=random))

    prompts = [draw(40) for _ in range(4)]
    numbers = [draw(5) - 1 for _ in range(draw(18))]
    batch = rows_of([(number, prompts[number], draw(30)) for number in numbers])
    micro_batches = plan_micro_batches(batch, size=size, max_tokens=70, share_prompts=packed)
    assert sorted(torch.cat(micro_batches).tolist()) == list(range(len(numbers)))
    assert max(computed_tokens(batch, micro_batches, packed=packed)) <= 70
    assert max(map(len, micro_batches)) <= (size or len(numbers))


@pytest.mark.parametrize(
    ("by_tokens", "size", "expected"),
    [
        (True, None, [1, 1, 2, 2]),
        (True, 1, [1] * 6),
        (True, 3, [1, 1, 2, 2]),
        (False, 4, [3, 3]),
        (False, None, [6]),
    ],
)
def test_an_engine_keeps_the_limits_of_its_settings(monkeypatch, by_tokens, size, expected):
    monkeypatch.setattr(base, "max_over_ranks", lambda own, device: own)
    batch = rows_of([(0, 10, 10), (1, 5, 5), (2, 5, 5), (3, 10, 10), (4, 5, 5), (5, 5, 5)])
    engine = EngineConfig(use_dynamic_bsz=by_tokens, max_tokens_per_micro_batch=20)
    plan = planned_by(engine, batch, size)
    assert sorted(len(rows) for rows in plan if rows is not None) == expected


def test_row_longer_than_the_budget_is_a_micro_batch_of_its_own():
    batch = rows_of([(0, 4, 1), (1, 9, 9), (2, 4, 1)])
    for packed in (True, False):
        plan = plan_micro_batches(batch, size=None, max_tokens=10, share_prompts=packed)
        assert sorted(sorted(rows.tolist()) for rows in plan) in ([[0], [1], [2]], [[0, 2], [1]])


def groups_of_plan(batch, plan) -> list[int]:
    """For each prompt of the batch, the number of micro-batches that compute it."""
    prompts = [{int(batch["input_ids"][row].max()) for row in rows} for rows in plan]
    return [sum(number in part for part in prompts) for number in sorted(set.union(*prompts))]


@pytest.mark.parametrize(
    ("groups", "size", "lengths", "computed"),
    [
        ([3, 2, 2, 1], 4, [4, 4], [1, 1, 1, 1]),
        ([3, 3], 4, [3, 3], [1, 1]),
        # Whole groups would need four micro-batches.
        ([3, 3, 3, 3], 4, [4, 4, 4], [1, 2, 2, 1]),
        ([8], 3, [3, 3, 2], [3]),
    ],
)
def test_rows_of_a_fixed_number_need_no_more_micro_batches_than_before(
    groups, size, lengths, computed
):
    batch = rows_of([(group, 4, 2) for group, rows in enumerate(groups) for _ in range(rows)])
    plan = plan_micro_batches(batch, size=size, max_tokens=None, share_prompts=True)
    assert sorted(torch.cat(plan).tolist()) == list(range(sum(groups)))
    assert sorted(map(len, plan), reverse=True) == lengths
    assert groups_of_plan(batch, plan) == computed


def test_micro_batches_have_equal_costs_and_the_most_expensive_one_is_first():
    """By tokens 60 + 20 and 40 + 40 are equal. By cost, n tokens cost n · (n + 1) / 2."""
    cost = CostModel(token=0.0, attention=(AttentionCost(1.0),))
    batch = rows_of([(0, 1, 59), (1, 1, 39), (2, 1, 39), (3, 1, 19)])
    settings = {"size": None, "max_tokens": 130, "share_prompts": True}
    by_tokens = plan_micro_batches(batch, **settings)
    assert sorted(sorted(part.tolist()) for part in by_tokens) == [[0, 3], [1, 2]]
    # 1830 against 820 + 820 + 210 = 1850.
    by_cost = plan_micro_batches(batch, **settings, cost=cost)
    assert [sorted(part.tolist()) for part in by_cost] == [[1, 2, 3], [0]]
    # A budget of 99 tokens does not allow that.
    tight = plan_micro_batches(batch, **{**settings, "max_tokens": 99}, cost=cost)
    assert [sorted(part.tolist()) for part in tight] == [[0, 3], [1, 2]]


def test_a_rank_matches_the_micro_batches_of_the_others_if_its_groups_allow_it(monkeypatch):
    batch = rows_of([(group, 10, 5) for group in range(3) for _ in range(2)])

    engine = EngineConfig(max_tokens_per_micro_batch=60)

    def counts(others: int) -> list[int | None]:
        monkeypatch.setattr(base, "max_over_ranks", lambda own, device: max(own, others))
        found = planned_by(engine, batch)
        return [None if rows is None else len(rows) for rows in found]

    assert counts(1) == [6]
    assert counts(2) == [4, 2]
    assert counts(3) == [2, 2, 2]
    assert counts(4) == [2, 2, 2, None]


def test_a_prompt_group_is_split_if_stages_would_wait():
    """One prompt with seven responses: one micro-batch, but four stages need four."""
    batch = rows_of([(0, 4, length) for length in (3, 1, 5, 2, 2, 4, 1)])
    settings = {"size": None, "max_tokens": 1000, "share_prompts": True}
    assert len(plan_micro_batches(batch, **settings, least=4)) == 1
    for stages in (2, 3, 4, 7):
        plan = plan_micro_batches(batch, **settings, stages=stages)
        assert len(plan) == stages
        assert sorted(torch.cat(plan).tolist()) == list(range(7))
    assert len(plan_micro_batches(batch, **settings, stages=9)) == 7
