"""Advantages from returns over time: GAE, REINFORCE++, ReMax. Shapes: B samples, T tokens.

`response_mask_BT` is 1 on the tokens that the policy generated and 0 on padding and observations
(tool output between turns). Only generated tokens are time steps, and values outside the mask are
ignored. Every function returns (advantages_BT, returns_BT), 0 outside the mask.
"""

from __future__ import annotations

from torch import Tensor

from quadriga.algorithms.checks import as_float, require_finite, require_same_shape, to_bool_mask
from quadriga.algorithms.masked import masked_copy, whiten_selected
from quadriga.algorithms.scan import (
    is_left_aligned,
    pack_left,
    reverse_discounted_sum,
    unpack_left,
)


def _generated_tokens(mask_BT: Tensor, name: str, tensor_BT: Tensor) -> Tensor:
    """Return a float copy with 0 outside the mask, after checking shape and finiteness.

    The callers compute in place in this copy, because allocating memory takes longer here than
    the arithmetic.
    """
    require_same_shape("response_mask", mask_BT, **{name: tensor_BT})
    kept = masked_copy(as_float(tensor_BT.detach()), mask_BT)
    require_finite(**{name: kept})
    return kept


# γ = 0.5, λ = 0.5, one response with an observation (o) between its two turns:
#
#     token             a      b      o      c
#     mask              1      1      0      1
#     reward r          0      0      8      4
#     value V           1      2      5      2
#
# 1. Pack the generated tokens to the left, because b and c are adjacent in time:
#                       a      b      c
#     r                 0      0      4
#     V                 1      2      2
# 2. δ = r + γ·V_next − V; the value after the last token is 0:
#     δ                 0+1−1  0+1−2  4+0−2   =   0      −1     2
# 3. A = δ + γλ·A_next, from the right, γλ = 0.25:
#     A                 −0.125 −0.5   2
# 4. return = A + V:    0.875  1.5    4
# 5. Unpack:       A    −0.125 −0.5   0      2
#
# The reward 8 and the value 5 of the observation have no effect.
def gae(
    token_level_rewards_BT: Tensor,
    values_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten_advantages: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute generalized advantage estimation (arXiv 1506.02438, eq. 16).

    δ_t = r_t + γ·V_{t+1} − V_t,  A_t = δ_t + γλ·A_{t+1},  return_t = A_t + V_t,
    where t+1 is the next generated token (V and A are 0 after the last one).

    Deviation from the paper: A is then whitened over the batch, as PPO implementations for
    language models do. The returns are not whitened.

    Args:
        whiten_advantages: False omits the whitening; None whitens.
    """
    mask = to_bool_mask(response_mask_BT)
    rewards = _generated_tokens(mask, "token_level_rewards", token_level_rewards_BT)
    values = _generated_tokens(mask, "values", values_BT)
    front = mask
    if has_gaps := not is_left_aligned(mask):
        front, rewards, values = pack_left(mask, rewards, values)
    # In place: `rewards` becomes δ, later `values` becomes the returns.
    deltas = rewards.sub_(values)
    deltas[:, :-1].add_(values[:, 1:], alpha=gamma)
    advantages = reverse_discounted_sum(deltas, gamma * lam)
    returns = values.add_(advantages)
    if has_gaps:
        advantages = unpack_left(advantages, front, mask)
        returns = unpack_left(returns, front, mask)
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
    """Compute REINFORCE++ advantages (arXiv 2501.03262): returns, whitened over the batch.

    return_t = r_t + γ·return_{t+1} over the generated tokens;  A = (return − mean) / std.

    Args:
        whiten_advantages: False omits the whitening; None whitens.
    """
    mask = to_bool_mask(response_mask_BT)
    rewards = _generated_tokens(mask, "token_level_rewards", token_level_rewards_BT)
    if is_left_aligned(mask):
        returns = reverse_discounted_sum(rewards, gamma)
    else:
        front, rewards = pack_left(mask, rewards)
        returns = unpack_left(reverse_discounted_sum(rewards, gamma), front, mask)
    if whiten_advantages is False:
        return returns.clone(), returns
    # The rewards are not needed any more, so their memory receives the advantages.
    out = rewards if rewards.shape == returns.shape else None
    return whiten_selected(returns, mask, out=out), returns


def remax(
    token_level_rewards_BT: Tensor, response_mask_BT: Tensor, reward_baselines_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ReMax advantages (arXiv 2310.10505), whose baseline is the greedy response's reward.

    A_t = Σ_{s≥t} r_s − b, where b [B] is the reward of the greedy response to the same prompt.
    """
    mask = to_bool_mask(response_mask_BT)
    rewards = _generated_tokens(mask, "token_level_rewards", token_level_rewards_BT)
    require_same_shape("samples", mask.new_empty(len(mask)), reward_baselines=reward_baselines_B)
    require_finite(reward_baselines=reward_baselines_B)
    # γ = 1 and rewards of 0 at gaps: the sum over all positions equals the sum over generated
    # tokens, so the rows need not be packed.
    returns = masked_copy(reverse_discounted_sum(rewards, 1.0), mask)
    baselines = reward_baselines_B.detach().to(returns.dtype)
    return masked_copy(returns - baselines[:, None], mask), returns
