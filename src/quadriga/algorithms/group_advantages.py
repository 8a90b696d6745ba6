"""Advantages from comparing the samples of one prompt. Shapes: B samples, T tokens, K rewards.

The reward of a sample is the sum of its token-level rewards under the mask; its advantage is one
number, spread over its own tokens. A group whose rewards are all equal (a group of one is such a
group) gets exactly zero: it holds no comparison. Every function returns the same tensor twice,
as (advantages_BT, returns_BT), 0 outside the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quadriga.algorithms.checks import (
    as_float,
    require_finite,
    require_same_shape,
    row_blocks,
    to_bool_mask,
)
from quadriga.algorithms.groups import Groups, require_group_size
from quadriga.algorithms.masked import keep, whiten_selected
from quadriga.errors import ShapeError

STD_EPSILON = 1e-6


def sequence_scores(token_level_rewards_BT: Tensor, response_mask_BT: Tensor) -> Tensor:
    """Σ_t r_t over the policy's own tokens, float64 [B]."""
    mask = to_bool_mask(response_mask_BT)
    require_same_shape("response_mask", mask, token_level_rewards=token_level_rewards_BT)
    rewards = as_float(token_level_rewards_BT.detach())
    pairs = zip(row_blocks(rewards), row_blocks(mask), strict=True)
    sums = [torch.where(kept, values, 0).sum(-1) for values, kept in pairs]
    scores_B = torch.cat(sums).double()
    if not bool(torch.isfinite(scores_B).all()):
        require_finite(token_level_rewards=keep(rewards, mask))
    return scores_B


def _spread(scores_B: Tensor, like_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """One number a sample to every own token, in the dtype of the rewards."""
    dtype = torch.float64 if like_BT.dtype == torch.float64 else torch.float32
    advantages = keep(scores_B.to(dtype)[:, None], to_bool_mask(mask_BT))
    return advantages, advantages


def grpo(
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups: Groups,
    *,
    norm_adv_by_std: bool = True,
) -> tuple[Tensor, Tensor]:
    """GRPO (arXiv 2402.03300, section 4.1.2): A_i = (r_i − mean r) / (std r + 1e-6).

    The standard deviation is the sample's (n − 1). Without it: Dr.GRPO.
    """
    scores = sequence_scores(token_level_rewards_BT, response_mask_BT)
    return _spread(
        _group_normalised(scores, groups, norm_adv_by_std), token_level_rewards_BT, response_mask_BT
    )


def _group_normalised(scores_B: Tensor, groups: Groups, by_std: bool) -> Tensor:
    centred = groups.centre_B(scores_B)
    return centred / (groups.std_G(scores_B)[groups.index_B] + STD_EPSILON) if by_std else centred


def dr_grpo(
    token_level_rewards_BT: Tensor, response_mask_BT: Tensor, groups: Groups
) -> tuple[Tensor, Tensor]:
    """Dr.GRPO (arXiv 2503.20783): A_i = r_i − mean r.

    Its other half is the aggregation `seq-mean-token-sum-norm`, which does not divide by length.
    """
    return grpo(token_level_rewards_BT, response_mask_BT, groups, norm_adv_by_std=False)


def grpo_passk(
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups: Groups,
    *,
    norm_adv_by_std: bool = True,
) -> tuple[Tensor, Tensor]:
    """Pass@k (arXiv 2503.19595): only the best sample learns, by how much it beats the second.

    A_best = r_best − r_second (over std + 1e-6), 0 for all others; a tie for the best gives 0.

    Raises:
        GroupError: a group with a single member.
    """
    require_group_size(groups, 2, "grpo_passk")
    scores = sequence_scores(token_level_rewards_BT, response_mask_BT)
    best = groups.extreme_G(scores, largest=True)
    is_best = (scores == best[groups.index_B]) & groups.member_B
    others = Groups(groups.index_B, groups.member_B & ~is_best, groups.num_groups)
    second = others.extreme_G(scores, largest=True)
    alone = (groups.sum_G(is_best) == 1)[groups.index_B] & is_best
    lead = (best - second)[groups.index_B].masked_fill(~alone, 0.0)
    if norm_adv_by_std:
        lead = lead / (groups.std_G(scores)[groups.index_B] + STD_EPSILON)
    return _spread(lead, token_level_rewards_BT, response_mask_BT)


def rloo(
    token_level_rewards_BT: Tensor, response_mask_BT: Tensor, groups: Groups
) -> tuple[Tensor, Tensor]:
    """RLOO (arXiv 2402.14740): A_i = r_i − mean of the others = n/(n−1)·(r_i − mean r)."""
    scores = sequence_scores(token_level_rewards_BT, response_mask_BT)
    count = groups.count_G()
    factor = count / (count - 1).clamp(min=1)
    return _spread(
        groups.centre_B(scores) * factor[groups.index_B], token_level_rewards_BT, response_mask_BT
    )


def opo(
    token_level_rewards_BT: Tensor, response_mask_BT: Tensor, groups: Groups
) -> tuple[Tensor, Tensor]:
    """OPO (arXiv 2505.23585): the baseline weighs samples by length.

    A_i = r_i − Σ_j l_j·r_j / Σ_j l_j, with l the number of own tokens.
    """
    scores = sequence_scores(token_level_rewards_BT, response_mask_BT)
    lengths = to_bool_mask(response_mask_BT).sum(-1).double()
    # Centred first: the weighted mean of equal rewards is then exactly theirs.
    centred = groups.centre_B(scores)
    shift = groups.sum_G(lengths * centred) / groups.sum_G(lengths).clamp(min=1)
    return _spread(centred - shift[groups.index_B], token_level_rewards_BT, response_mask_BT)


def gpg(
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups: Groups,
    *,
    f_norm: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """GPG (arXiv 2504.02546): A_i = α·(r_i − mean r) / F_norm, α = B / (B − M).

    M counts the samples of groups whose rewards are all equal, so that α makes up for the
    gradient they do not give.
    """
    scores = sequence_scores(token_level_rewards_BT, response_mask_BT)
    useful = (groups.signal_G(scores)[groups.index_B] & groups.member_B).sum()
    alpha = groups.member_B.sum() / useful.clamp(min=1)
    return _spread(
        groups.centre_B(scores) * (alpha / f_norm), token_level_rewards_BT, response_mask_BT
    )


def reinforce_plus_plus_baseline(
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups: Groups,
    *,
    whiten_advantages: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """REINFORCE++-baseline (arXiv 2501.03262): r_i − mean r, whitened over the batch's tokens."""
    scores = sequence_scores(token_level_rewards_BT, response_mask_BT)
    advantages, _ = _spread(groups.centre_B(scores), token_level_rewards_BT, response_mask_BT)
    if whiten_advantages is not False:
        advantages = whiten_selected(advantages, to_bool_mask(response_mask_BT))
    return advantages, advantages


def gdpo(
    reward_components_BK: Tensor,
    response_mask_BT: Tensor,
    groups: Groups,
    *,
    norm_adv_by_std: bool = True,
    whiten_advantages: bool | None = None,
    reward_weights: list[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """GDPO (arXiv 2601.05242): each reward component is normalised in its group by itself.

    A_i = Σ_k w_k·(r_ik − mean r_k) / (std r_k + 1e-6), then whitened over the batch's samples
    (not tokens, so a long answer does not weigh more).

    Args:
        reward_components_BK: [B, K] one column a component.
        reward_weights: w, K numbers; None: all 1.
    """
    mask = to_bool_mask(response_mask_BT)
    if reward_components_BK.dim() != 2 or reward_components_BK.shape[0] != mask.shape[0]:
        raise ShapeError(
            f"`reward_components` must be [{mask.shape[0]}, K], but has shape "
            f"{list(reward_components_BK.shape)}.",
            tensor="reward_components",
            got=tuple(reward_components_BK.shape),
        )
    number = reward_components_BK.shape[1]
    weights = [1.0] * number if reward_weights is None else reward_weights
    if len(weights) != number:
        raise ShapeError(
            f"`reward_weights` has {len(weights)} numbers for {number} reward components.",
            tensor="reward_weights",
            expected=number,
            got=len(weights),
        )
    components = reward_components_BK.detach().double()
    components = components.masked_fill(~groups.member_B[:, None], 0.0)
    require_finite(reward_components=components)
    total = torch.zeros_like(components[:, 0])
    for column, weight in enumerate(weights):
        total += weight * _group_normalised(components[:, column], groups, norm_adv_by_std)
    if whiten_advantages is not False:
        total = whiten_selected(total, groups.member_B)
    return _spread(total, reward_components_BK, mask)
