"""Advantages from returns over time: GAE, REINFORCE++, ReMax. Shapes: B samples, T tokens.

`mask_BT` is the response mask: 1 on the policy's own tokens, 0 on padding and on observations
(tool output between turns). Time passes on the policy's own tokens only, and what lies outside
the mask never matters. Every function returns (advantages_BT, returns_BT), 0 outside the mask.
"""

from __future__ import annotations

from torch import Tensor

from quadriga.algorithms.checks import as_float, require_finite, require_same_shape, to_bool_mask
from quadriga.algorithms.masked import keep, whiten_selected
from quadriga.algorithms.scan import (
    close_holes,
    reopen_holes,
    reverse_discounted_sum,
    starts_at_front,
)


def _own_tokens(mask_BT: Tensor, name: str, tensor_BT: Tensor) -> Tensor:
    """A copy as float, 0 outside the mask; the shape and the values are checked.

    Fresh memory costs more than the arithmetic here, so callers go on in this copy.
    """
    require_same_shape("response_mask", mask_BT, **{name: tensor_BT})
    kept = keep(as_float(tensor_BT.detach()), mask_BT)
    require_finite(**{name: kept})
    return kept


def gae(
    token_level_rewards_BT: Tensor,
    values_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten_advantages: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438, eq. 16).

    δ_t = r_t + γ·V_{t+1} − V_t,  A_t = δ_t + γλ·A_{t+1},  return_t = A_t + V_t,
    where t+1 is the policy's next own token (0 after the last). Then A is whitened over the
    batch, which the paper does not do but every PPO for language models does;
    `whiten_advantages=False` leaves it out.
    """
    mask = to_bool_mask(response_mask_BT)
    rewards = _own_tokens(mask, "token_level_rewards", token_level_rewards_BT)
    values = _own_tokens(mask, "values", values_BT)
    front = mask
    if spaced := not starts_at_front(mask):
        front, rewards, values = close_holes(mask, rewards, values)
    deltas = rewards.sub_(values)
    deltas[:, :-1].add_(values[:, 1:], alpha=gamma)
    advantages = reverse_discounted_sum(deltas, gamma * lam)
    returns = values.add_(advantages)
    if spaced:
        advantages = reopen_holes(advantages, front, mask)
        returns = reopen_holes(returns, front, mask)
    if whiten_advantages is not False:
        whiten_selected(advantages, mask, out=advantages)
    return advantages, returns


def reinforce_plus_plus(
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    gamma: float = 1.0,
    whiten_advantages: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv 2501.03262): returns, whitened over the batch.

    return_t = r_t + γ·return_{t+1} over the policy's own tokens;  A = (return − mean) / std.
    """
    mask = to_bool_mask(response_mask_BT)
    rewards = _own_tokens(mask, "token_level_rewards", token_level_rewards_BT)
    if starts_at_front(mask):
        returns = reverse_discounted_sum(rewards, gamma)
    else:
        front, rewards = close_holes(mask, rewards)
        returns = reopen_holes(reverse_discounted_sum(rewards, gamma), front, mask)
    if whiten_advantages is False:
        return returns.clone(), returns
    room = rewards if rewards.shape == returns.shape else None
    return whiten_selected(returns, mask, out=room), returns


def remax(
    token_level_rewards_BT: Tensor, response_mask_BT: Tensor, reward_baselines_B: Tensor
) -> tuple[Tensor, Tensor]:
    """ReMax (arXiv 2310.10505): the greedy answer's reward is the baseline.

    A_t = Σ_{s≥t} r_s − b, where b [B] is the reward of the greedy response to the same prompt.
    """
    mask = to_bool_mask(response_mask_BT)
    rewards = _own_tokens(mask, "token_level_rewards", token_level_rewards_BT)
    require_same_shape("samples", mask.new_empty(len(mask)), reward_baselines=reward_baselines_B)
    require_finite(reward_baselines=reward_baselines_B)
    returns = keep(reverse_discounted_sum(rewards, 1.0), mask)
    baselines = reward_baselines_B.detach().to(returns.dtype)
    return keep(returns - baselines[:, None], mask), returns
