"""Advantages against numbers computed by hand."""

import pytest
import torch

from quadriga.algorithms.advantages import compute_advantages

# The example of `advantages.py`, and a second prompt whose two responses have equal rewards.
REWARDS = torch.tensor([[0.0, 0.0], [5.0, 0.0], [3.0, 0.0], [0.0, 6.0], [5.0, 0.0]])
MASK = torch.tensor([[1, 0], [1, 0], [1, 0], [1, 1], [1, 0]])
GROUPS = ["a", "b", "a", "a", "b"]


@pytest.mark.parametrize(
    ("name", "first", "second", "third"),
    [
        ("dr_grpo", -3.0, 0.0, 3.0),
        ("grpo", -1.0, 0.0, 1.0),
        ("rloo", -4.5, 0.0, 4.5),
        ("grpo_passk", 0.0, 0.0, 1.0),
        ("opo", -3.75, -0.75, 2.25),
        ("gpg", -5.0, 0.0, 5.0),  # α = 5 / 3
    ],
)
def test_the_example_of_the_module(name: str, first: float, second: float, third: float) -> None:
    advantages, _ = compute_advantages(
        name, token_level_rewards_BT=REWARDS, response_mask_BT=MASK, group_ids=GROUPS
    )
    assert advantages[:, 0].tolist() == pytest.approx([first, 0.0, second, third, 0.0], abs=1e-6)
    assert advantages[:, 1].tolist() == pytest.approx([0.0, 0.0, 0.0, third, 0.0], abs=1e-6)
