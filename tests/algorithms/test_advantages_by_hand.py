"""Advantages against numbers computed by hand."""

from __future__ import annotations

import pytest
import torch

from quadriga.algorithms.advantages import compute_advantages


def scores_to_rewards(scores: list[float], length: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    rewards = torch.zeros(len(scores), length, dtype=torch.float64)
    rewards[:, -1] = torch.tensor(scores, dtype=torch.float64)
    return rewards, torch.ones(len(scores), length, dtype=torch.int64)


def per_sample(
    name: str, scores: list[float], groups: list[str], **settings: object
) -> list[float]:
    rewards, mask = scores_to_rewards(scores)
    advantages, _ = compute_advantages(
        name,
        token_level_rewards_BT=rewards,
        response_mask_BT=mask,
        group_ids=groups,
        **settings,
    )
    assert torch.equal(advantages[:, 0], advantages[:, 1])
    return advantages[:, 0].tolist()


def test_grpo_divides_by_the_sample_standard_deviation():
    # Group a: 0, 2 → mean 1, std √2. Group b: 1, 1 → zero-variance.
    got = per_sample("grpo", [0.0, 1.0, 2.0, 1.0], ["a", "b", "a", "b"])
    step = 1 / (2**0.5 + 1e-6)
    assert got == pytest.approx([-step, 0.0, step, 0.0], abs=1e-12)


def test_dr_grpo_and_rloo_by_hand():
    scores, groups = [0.0, 3.0, 6.0, 5.0], ["a", "a", "a", "b"]
    assert per_sample("dr_grpo", scores, groups) == [-3.0, 0.0, 3.0, 0.0]
    # Means of the other two: 4.5, 3, 1.5.
    assert per_sample("rloo", scores, groups) == [-4.5, 0.0, 4.5, 0.0]


def test_passk_gives_the_best_sample_its_lead_over_the_second():
    got = per_sample("grpo_passk", [1.0, 4.0, 2.0], ["a"] * 3, norm_adv_by_std=False)
    assert got == [0.0, 2.0, 0.0]
    assert per_sample("grpo_passk", [4.0, 4.0], ["a"] * 2) == [0.0, 0.0]


def test_gpg_corrects_for_groups_without_signal():
    got = per_sample("gpg", [0.0, 2.0, 1.0, 1.0], ["a", "a", "b", "b"])
    assert got == [-2.0, 2.0, 0.0, 0.0]  # α = 4 / 2


def test_gdpo_whitens_over_samples_not_tokens():
    # Samples of three tokens and of one token. Whitened over samples, they get ∓1/√2; whitened
    # over tokens, the longer one would get a smaller number.
    advantages, _ = compute_advantages(
        "gdpo",
        token_level_rewards_BT=torch.zeros(2, 3),
        response_mask_BT=torch.tensor([[1, 1, 1], [1, 0, 0]]),
        group_ids=[0, 0],
        reward_components_BK=torch.tensor([[0.0], [4.0]]),
    )
    half = 0.5**0.5
    assert advantages[:, 0].tolist() == pytest.approx([-half, half], abs=1e-5)
