"""Invariants of every estimator, loss and aggregation, tested on random batches."""

from dataclasses import replace
from typing import Any

import algorithm_cases
import algorithm_reference as ref
import pytest
import torch
from algorithm_cases import NAN, Case, cases, loss_of, selection
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor

from quadriga.algorithms.advantages import ADVANTAGES
from quadriga.algorithms.aggregation import AGGREGATIONS, aggregate, count_mask, merge_partials
from quadriga.algorithms.kl import entropy_bonus, kl_loss
from quadriga.algorithms.policy_losses import POLICY_LOSSES

GROUP_ESTIMATORS = [name for name, entry in ADVANTAGES.items() if entry.needs_groups]
OF_TURNS = "turn_gae", "gigpo"  # an observation divides a response into two time steps
LENGTH = 7.0  # loss_scale_length of seq-mean-token-sum-norm


def advantages_of(name: str, case: Case, **options: Any) -> tuple[Tensor, Tensor]:
    if name == "grpo_passk":
        sizes = {len(m) for m in ref.members_of(case.groups, case.mask).values()}
        assume(1 not in sizes)
    return algorithm_cases.advantages_of(name, case, **options)


def contribution(
    name: str, mode: str, case: Case, log_prob: Tensor, whole: Case, selected: Tensor | None
) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss of one micro-batch: policy, entropy and KL terms with global counts."""
    policy = loss_of(name, case, log_prob, selected_BT=selected)
    kl = kl_loss(log_prob, case.rollout_log_prob, case.mask, kl_loss_coef=0.1)
    bonus = entropy_bonus(case.entropy - 0.5 * log_prob, case.mask, entropy_coeff=0.01)
    tokens, sequences = count_mask(whole.mask)
    loss = aggregate(
        policy.loss_BT + kl.loss_BT + bonus.loss_BT, case.mask, mode, global_tokens=tokens,
        global_sequences=sequences, loss_scale_length=LENGTH,
    )  # fmt: skip
    return loss, policy.metrics


MODES = st.sampled_from(list(AGGREGATIONS))


@settings(max_examples=15, deadline=None)
@given(cases, MODES, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]))
@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_gradient_does_not_depend_on_micro_batches_or_ranks(
    name: str, case: Case, mode: str, micro: int, ranks: int
) -> None:
    whole = case.log_prob.clone().requires_grad_()
    loss, metrics = contribution(name, mode, case, whole, case, selected := selection(name, case))
    loss.backward()
    parts = case.log_prob.clone().requires_grad_()
    gathered, total = [], 0.0
    for rank in range(ranks):
        rows_of_rank = torch.arange(len(case.groups))[rank::ranks]
        for rows in rows_of_rank.split(micro):
            piece, piece_metrics = contribution(
                name, mode, case.rows(rows), parts[rows], case,
                None if selected is None else selected[rows],
            )  # fmt: skip
            piece.backward()
            total += piece.item()
            gathered.append(piece_metrics)
    assert total == pytest.approx(loss.item(), rel=1e-6, abs=1e-9)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-6, atol=1e-9)
    assert merge_partials(gathered) == pytest.approx(merge_partials([metrics]), rel=1e-6, abs=1e-9)


@settings(max_examples=15, deadline=None)
@given(cases, MODES)
@pytest.mark.parametrize("name", list(POLICY_LOSSES))
def test_losses_ignore_values_outside_the_mask(name: str, case: Case, mode: str) -> None:
    """Values outside the mask (NaN, 0, 1e30) and two columns of padding change no result."""
    outcomes = []
    for variant in (case, filled(case, 0.0), filled(case, 1e30), widened(case)):
        log_prob = variant.log_prob.clone().requires_grad_()
        loss, metrics = contribution(
            name, mode, variant, log_prob, variant, selection(name, variant)
        )
        loss.backward()
        assert not bool(log_prob.grad[variant.mask == 0].any())
        outcomes.append((loss.item(), log_prob.grad[:, -case.mask.shape[1] :], metrics))
    for loss, grad, metrics in outcomes[1:]:
        assert loss == pytest.approx(outcomes[0][0], rel=1e-12, abs=1e-15)
        torch.testing.assert_close(grad, outcomes[0][1], rtol=1e-12, atol=1e-15)
        assert merge_partials([metrics]) == pytest.approx(merge_partials([outcomes[0][2]]))


def token_fields(case: Case) -> dict[str, Tensor]:
    return {
        name: value
        for name, value in vars(case).items()
        if isinstance(value, Tensor) and name not in ("baselines", "components")
    }


def filled(case: Case, value: float) -> Case:
    """Return the batch with `value` outside the mask."""
    changed = {
        name: torch.where(case.mask == 0, value, tensor)
        for name, tensor in token_fields(case).items()
        if name not in ("mask", "responses")
    }
    return replace(case, **changed)


def widened(case: Case) -> Case:
    """Return the batch with two more columns of padding on the left."""
    changed = {
        name: torch.nn.functional.pad(
            tensor, (2, 0), value=0 if name in ("mask", "responses") else NAN
        )
        for name, tensor in token_fields(case).items()
    }
    return replace(case, **changed)


@settings(max_examples=8, deadline=None)
@given(cases)
@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_advantages_ignore_values_outside_the_mask(name: str, case: Case) -> None:
    first = advantages_of(name, case)
    for variant in (filled(case, 0.0), filled(case, 1e30), widened(case)):
        again = advantages_of(name, variant)
        for before, after in zip(first, again, strict=True):
            assert not bool(after[variant.mask == 0].any())
            torch.testing.assert_close(after[:, -before.shape[1] :], before, rtol=1e-12, atol=1e-12)


@settings(max_examples=8, deadline=None)
@given(cases)
@pytest.mark.parametrize("name", [name for name in ADVANTAGES if name not in OF_TURNS])
def test_removing_observations_changes_no_advantage(name: str, case: Case) -> None:
    """Only generated tokens are time steps, so a response with gaps equals one without."""
    mask, width = case.mask.bool(), case.mask.shape[1]
    front = torch.arange(width) < mask.sum(-1, keepdim=True)
    packed = {"mask": front.long()}
    for key in ("rewards", "values"):
        packed[key] = torch.zeros(mask.shape, dtype=torch.float64)
        packed[key][front] = getattr(case, key)[mask]
    spaced = advantages_of(name, case, gamma=0.9, lam=0.8)
    dense = advantages_of(name, replace(case, **packed), gamma=0.9, lam=0.8)
    for with_gaps, without in zip(spaced, dense, strict=True):
        torch.testing.assert_close(with_gaps[mask], without[front], rtol=1e-9, atol=1e-9)


@settings(max_examples=8, deadline=None)
@given(cases, st.randoms(use_true_random=False))
@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_permuting_samples_permutes_advantages(name: str, case: Case, random: Any) -> None:
    order = list(range(len(case.groups)))
    random.shuffle(order)
    rows = torch.tensor(order)
    for before, after in zip(
        advantages_of(name, case), advantages_of(name, case.rows(rows)), strict=True
    ):
        torch.testing.assert_close(after, before[rows], rtol=1e-9, atol=1e-9)


@settings(max_examples=8, deadline=None)
@given(cases, st.sampled_from([0.1, 1.0, -3.7, 1e6]))
@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_groups_of_equal_rewards_have_advantage_exactly_zero(
    name: str, case: Case, reward: float
) -> None:
    rewards = torch.zeros_like(case.rewards)
    for i, positions in enumerate(ref.token_positions(case.mask)):
        if positions:
            rewards[i, positions[-1]] = reward
    constant = replace(case, rewards=rewards, components=torch.full_like(case.components, reward))
    assert not bool(advantages_of(name, constant)[0].any())
    narrow = replace(constant, rewards=rewards.float(), components=constant.components.float())
    assert not bool(advantages_of(name, narrow)[0].any())


@settings(max_examples=8, deadline=None)
@given(cases, st.floats(-5, 5))
@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_shifting_the_rewards_of_a_group_changes_no_advantage(
    name: str, case: Case, shift: float
) -> None:
    rewards, components = case.rewards.clone(), case.components.clone()
    for i, positions in enumerate(ref.token_positions(case.mask)):
        if case.groups[i] == "prompt-0":
            components[i] += shift
            if positions:
                rewards[i, positions[-1]] += shift
    # Exclude scores that differ only by rounding: the shift could make them equal, or unequal.
    scores = ref.scores_of(rewards, case.mask)
    assume(near_ties(scores, case) == near_ties(ref.scores_of(case.rewards, case.mask), case) == 0)
    assume(abs(shift) > 1e-3)
    shifted = replace(case, rewards=rewards, components=components)
    before, after = advantages_of(name, case)[0], advantages_of(name, shifted)[0]
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-7)


def near_ties(scores: list[float], case: Case) -> int:
    """Count ordered pairs of one group whose scores differ by less than 1e-6 but are not equal."""
    return sum(
        0 < abs(a - b) < 1e-6
        for i, a in enumerate(scores)
        for j, b in enumerate(scores)
        if case.groups[i] == case.groups[j]
    )


RATIO_LOSSES = [name for name, entry in POLICY_LOSSES.items() if "old_log_prob_BT" in entry.needs]


@settings(max_examples=20, deadline=None)
@given(cases)
@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_the_ratio_of_the_first_optimizer_step_is_exactly_one(name: str, case: Case) -> None:
    ranges = {"clip_ratio_low": 0.0, "clip_ratio_high": 0.0} if "clip" in name else {}
    same = {"rollout_log_prob_BT": case.old_log_prob, **ranges}
    result = loss_of(name, case, case.old_log_prob.clone(), **same)
    metrics = merge_partials([result.metrics])
    if "ratio_max" in metrics:
        assert metrics["ratio_max"] == metrics["ratio_min"] == 1.0
        assert metrics.get("pg_clipfrac", 0.0) == 0.0 and metrics["ppo_kl"] == 0.0


@settings(max_examples=20, deadline=None)
@given(cases)
@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if name != "decoupled_ppo"])
def test_the_gradient_of_the_first_optimizer_step_is_the_policy_gradient(
    name: str, case: Case
) -> None:
    """At ratio 1, every loss aggregated by sequence means has the gradient −A·∇log π.

    Each response has one advantage, as with group estimators.
    """
    advantages = case.advantages.nan_to_num().mean(-1, keepdim=True).expand(case.mask.shape)
    grads = []
    for loss_name in (name, "policy_gradient"):
        log_prob = case.old_log_prob.clone().requires_grad_()
        given = {"advantages_BT": advantages, "selected_BT": torch.zeros_like(case.mask)}
        loss = loss_of(loss_name, case, log_prob, **given).loss_BT
        aggregate(
            loss, case.mask, "seq-mean-token-mean", global_tokens=int(case.mask.sum()),
            global_sequences=len(case.groups),
        ).backward()  # fmt: skip
        grads.append(log_prob.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-12)
