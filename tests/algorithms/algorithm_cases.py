"""Random batches for the algorithm tests: masks with gaps and left padding, groups of 1 to 9."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from quadriga.algorithms.advantages import compute_advantages
from quadriga.algorithms.clipped_losses import PolicyLoss
from quadriga.algorithms.policy_losses import compute_policy_loss, get_policy_loss, select_tokens

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """A batch in float64. Values outside the mask are NaN, because no function may read them."""

    rewards: Tensor
    mask: Tensor
    groups: list[str]
    values: Tensor
    baselines: Tensor
    components: Tensor
    log_prob: Tensor
    old_log_prob: Tensor
    rollout_log_prob: Tensor
    advantages: Tensor
    entropy: Tensor
    responses: Tensor

    def rows(self, index: Tensor) -> Case:
        """Return the batch with the samples that `index` selects, in that order."""
        picked = {
            name: [value[int(i)] for i in index] if isinstance(value, list) else value[index]
            for name, value in vars(self).items()
        }
        return replace(self, **picked)


def random_mask(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    """Return a mask; a row has left padding, generated tokens with gaps, and right padding."""
    mask = np.zeros((count, width), dtype=np.int64)
    for row in mask:
        start = rng.integers(0, width) if rng.random() < 0.2 else 0
        end = rng.integers(start, width + 1)
        row[start:end] = 1
        if rng.random() < 0.5:
            row[rng.random(width) < 0.3] = 0
    return mask


def make_case(seed: int, *, max_groups: int = 4, max_width: int = 9) -> Case:
    """Create a batch of groups of 1 to 9 samples in random order, with many equal rewards."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 10, rng.integers(1, max_groups + 1))
    groups = [f"prompt-{g}" for g, size in enumerate(sizes) for _ in range(size)]
    rng.shuffle(groups)
    count, width = len(groups), int(rng.integers(1, max_width + 1))
    mask = random_mask(rng, count, width)

    def tokens(values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.where(mask == 1, values, NAN))

    def log_probs(spread: float) -> np.ndarray:
        return -rng.exponential(1.0, (count, width)) + spread * rng.normal(size=(count, width))

    coarse = rng.random() < 0.5
    rewards = rng.integers(0, 2, (count, width)) if coarse else rng.normal(size=(count, width))
    old = log_probs(0.0)
    return Case(
        rewards=tokens(rewards.astype(np.float64)),
        mask=torch.from_numpy(mask),
        groups=groups,
        values=tokens(rng.normal(size=(count, width))),
        baselines=torch.from_numpy(rng.normal(size=count)),
        components=torch.from_numpy(rng.integers(0, 3, (count, 3)).astype(np.float64)),
        log_prob=tokens(old + rng.choice([0.02, 0.3, 2.0]) * rng.normal(size=(count, width))),
        old_log_prob=tokens(old),
        rollout_log_prob=tokens(old + 0.2 * rng.normal(size=(count, width))),
        advantages=tokens(rng.normal(size=(count, width))),
        entropy=tokens(rng.exponential(1.0, (count, width))),
        responses=torch.from_numpy(rng.integers(0, 2, (count, width))),
    )


cases = st.integers(0, 2**32 - 1).map(make_case)


def advantages_of(name: str, case: Case, **options: Any) -> tuple[Tensor, Tensor]:
    """Call the estimator with all inputs of the case."""
    return compute_advantages(
        name, token_level_rewards_BT=case.rewards, response_mask_BT=case.mask,
        group_ids=case.groups, values_BT=case.values, reward_baselines_B=case.baselines,
        reward_components_BK=case.components, responses_BT=case.responses, **options,
    )  # fmt: skip


def selection(name: str, case: Case, **options: Any) -> Tensor | None:
    """Select the tokens of a whole batch."""
    return select_tokens(
        name,
        old_log_prob_BT=case.old_log_prob,
        advantages_BT=case.advantages,
        response_mask_BT=case.mask,
        **{k: v for k, v in options.items() if k in get_policy_loss(name).select_settings},
    )


def loss_of(name: str, case: Case, log_prob: Tensor, **options: Any) -> PolicyLoss:
    """Compute the loss with all inputs of the case; it selects tokens unless some are given."""
    inputs: dict[str, Any] = {
        "old_log_prob_BT": case.old_log_prob,
        "advantages_BT": case.advantages,
        "response_mask_BT": case.mask,
        "rollout_log_prob_BT": case.rollout_log_prob,
    }
    if "selected_BT" not in options:
        inputs["selected_BT"] = selection(name, case, **options)
    return compute_policy_loss(name, log_prob_BT=log_prob, **{**inputs, **options})
