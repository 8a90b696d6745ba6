"""Reward shaping, zero-variance prompt groups, dynamic sampling."""

import algorithm_reference as ref
import pytest
import torch
from algorithm_cases import NAN, Case, cases
from hypothesis import given, settings

from quadriga.algorithms import shaping
from quadriga.algorithms.dynamic_sampling import dynamic_sampling
from quadriga.errors import AlgorithmError, GroupError, NonFiniteError, ShapeError, UnknownNameError


def test_overlong_penalty_by_hand() -> None:
    got = shaping.overlong_penalty(
        torch.tensor([0, 80, 85, 100, 120]), max_length=100, buffer_length=20, penalty_factor=2.0
    )
    assert got.tolist() == [0.0, 0.0, -0.5, -2.0, -2.0]
    assert not bool(torch.signbit(got[:1] + 0).any())
    with pytest.raises(AlgorithmError, match="buffer must be 1 … 100 tokens"):
        shaping.overlong_penalty(torch.tensor([1]), max_length=100, buffer_length=101)


def test_amounts_are_added_at_the_last_generated_token() -> None:
    rewards = torch.ones(3, 3)
    mask = torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 0]])
    got = shaping.add_to_last_token(rewards, mask, torch.tensor([-1.0, 4.0, 9.0]))
    assert got.tolist() == [[1, 1, 0], [5, 1, 1], [1, 1, 1]]
    assert rewards.tolist() == [[1] * 3] * 3


def test_truncated_samples_are_removed_from_the_mask() -> None:
    got = shaping.drop_truncated(torch.tensor([[1, 1], [1, 0]]), torch.tensor([1, 0]))
    assert got.tolist() == [[False, False], [True, False]]
    with pytest.raises(ShapeError, match="`truncated` has shape"):
        shaping.drop_truncated(torch.ones(2, 2), torch.ones(3))


@settings(max_examples=40, deadline=None)
@given(cases)
@pytest.mark.parametrize("limit", [None, 0.7])
@pytest.mark.parametrize("whiten", [False, True])
def test_clipping_and_whitening(limit: float | None, whiten: bool, case: Case) -> None:
    rows = [
        [min(max(x, -limit), limit) if limit else x for x in row] for row in case.rewards.tolist()
    ]
    if whiten:
        chosen = [
            rows[i][t]
            for i, positions in enumerate(ref.token_positions(case.mask))
            for t in positions
        ]
        centre = ref.mean(chosen) if chosen else 0.0
        rows = [[x + centre for x in row] for row in ref.whiten(rows, case.mask)]
    got = shaping.shape_rewards(case.rewards, case.mask, clip=limit, whiten=whiten)
    for i, ms in enumerate(case.mask.tolist()):
        for t, m in enumerate(ms):
            assert got[i, t].item() == pytest.approx(rows[i][t] if m else 0.0, rel=1e-6, abs=1e-7)


# Prompt groups: a and e are not zero-variance; b is solved, c is failed, and the equal scores of
# d are in between.
SCORES = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.5, 0.5, 1.0, 0.5])
GROUPS = ["a", "a", "b", "b", "c", "c", "d", "d", "e", "e"]


def test_metrics_of_zero_variance_groups_by_hand() -> None:
    got = shaping.zero_variance_metrics(SCORES, GROUPS)
    assert got == pytest.approx(
        {
            "total": 5.0,
            "dead": 3.0,
            "dead_fraction": 0.6,
            "dead_at_top": 0.2,
            "dead_at_bottom": 0.2,
            "std_mean": (0.5**0.5 + 0.125**0.5) / 5,
        }
    )
    assert (
        shaping.nonzero_variance_rows(SCORES, GROUPS).tolist()
        == [True] * 2 + [False] * 6 + [True] * 2
    )


def test_refill_requests_the_missing_groups_and_keeps_groups_with_signal() -> None:
    got = dynamic_sampling(SCORES, GROUPS, wanted_groups=3, gen_batches=2)
    assert (got.action, got.rows.tolist()) == ("refill", [0, 1, 8, 9])


def test_refill_stops_when_full_and_keeps_only_the_wanted_groups() -> None:
    got = dynamic_sampling(SCORES, GROUPS, wanted_groups=1)
    assert (got.action, got.rows.tolist()) == ("train", [0, 1])
    # Samples of a group need not be adjacent.
    order = [8, 0, 9, 1]
    got = dynamic_sampling(SCORES[order], [GROUPS[i] for i in order], wanted_groups=1)
    assert got.rows.tolist() == [0, 2]


def test_an_under_filled_batch_is_filled_with_weight_zero_or_raises() -> None:
    last = {"wanted_groups": 3, "gen_batches": 3, "max_num_gen_batches": 3}
    got = dynamic_sampling(SCORES, GROUPS, **last)
    assert (got.action, got.rows.tolist()) == ("train", [0, 1, 2, 3, 8, 9])
    assert got.kept == 2
    with pytest.raises(GroupError, match="2 of 5 prompt groups are not zero-variance after 3"):
        dynamic_sampling(SCORES, GROUPS, **last, under_filled="error")


def test_invalid_arguments_raise() -> None:
    rewards = torch.tensor([[5.0, -5.0, NAN], [0.5, 0.5, 0.5]])
    with pytest.raises(AlgorithmError, match="`reward_clip` must be above 0"):
        shaping.shape_rewards(rewards, torch.tensor([[1, 1, 0], [1, 1, 1]]), clip=0.0)
    with pytest.raises(NonFiniteError, match="`token_level_rewards` is nan at row 0, token 2"):
        shaping.shape_rewards(rewards, torch.ones(2, 3))
    with pytest.raises(UnknownNameError, match="no policy for under-filled batches 'stop'"):
        dynamic_sampling(SCORES, GROUPS, wanted_groups=1, under_filled="stop")
    with pytest.raises(AlgorithmError, match="must be at least 1"):
        dynamic_sampling(SCORES, GROUPS, wanted_groups=0)
    with pytest.raises(GroupError, match="at least one, but has shape"):
        shaping.zero_variance_metrics(torch.empty(0), [])
    with pytest.raises(NonFiniteError, match="`scores` is nan at row 1"):
        shaping.nonzero_variance_rows(torch.tensor([0.0, NAN]), ["a", "a"])
