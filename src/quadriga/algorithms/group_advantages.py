"""Advantages from comparing the samples of one prompt. Shapes: B samples, T tokens, K rewards.

The reward of a sample is the sum of its token-level rewards under the mask. Its advantage is one
number, which all its generated tokens receive. A prompt group whose rewards are all equal gets
exactly 0, because there is nothing to compare; a prompt group of one sample is such a group. Every
function returns the same tensor twice, as (advantages_BT, returns_BT), 0 outside the mask.
"""

from __future__ import annotations

import math

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
from quadriga.algorithms.masked import masked_copy, whiten_selected
from quadriga.errors import AlgorithmError, ShapeError

STD_EPSILON = 1e-6

# One prompt with three responses, rewards 0, 3, 6 and lengths 1, 1, 2:
#
#     mean r = 3, std r (n − 1) = √((9 + 0 + 9) / 2) = 3
#
#     dr_grpo      r − mean r                            −3     0      3
#     grpo         (r − mean r) / (std r + 1e-6)         −1     0      1
#     rloo         r − mean of the other two             −4.5   0      4.5
#     grpo_passk   best − second, over std               0      0      1
#     opo          r − (1·0 + 1·3 + 2·6) / (1 + 1 + 2)   −3.75  −0.75  2.25


def sequence_scores(token_level_rewards_BT: Tensor, response_mask_BT: Tensor) -> Tensor:
    """Return Σ_t r_t over each sample's generated tokens, float64 [B].

    Raises:
        ShapeError, MaskError, NonFiniteError.
    """
    mask = to_bool_mask(response_mask_BT)
    require_same_shape("response_mask", mask, token_level_rewards=token_level_rewards_BT)
    rewards = as_float(token_level_rewards_BT.detach())
    # Blocks of rows: the masked copy of a block stays in cache until it is summed.
    pairs = zip(row_blocks(rewards), row_blocks(mask), strict=True)
    sums = [torch.where(kept, values, 0).sum(-1) for values, kept in pairs]
    scores_B = torch.cat(sums).double()
    # NaN and infinity survive the sum, so B sums are checked instead of B·T rewards.
    if not bool(torch.isfinite(scores_B).all()):
        require_finite(token_level_rewards=masked_copy(rewards, mask))
    return scores_B


def _to_tokens(scores_B: Tensor, like_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Copy each sample's number to its generated tokens.

    The result is float64 if `like_BT` is, else float32, and is returned twice.
    """
    dtype = torch.float64 if like_BT.dtype == torch.float64 else torch.float32
    advantages = masked_copy(scores_B.to(dtype)[:, None], to_bool_mask(mask_BT))
    return advantages, advantages


def grpo(
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups: Groups,
    *,
    norm_adv_by_std: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute GRPO advantages (arXiv 2402.03300, section 4.1.2).

    A_i = (r_i − mean r) / (std r + 1e-6), with the sample standard deviation (n − 1).

    Args:
        norm_adv_by_std: False omits the division, which gives Dr.GRPO.
    """
    scores = sequence_scores(token_level_rewards_BT, response_mask_BT)
    normalised = _normalised_B(scores, groups, norm_adv_by_std)
    return _to_tokens(normalised, token_level_rewards_BT, response_mask_BT)


def _normalised_B(scores_B: Tensor, groups: Groups, by_std: bool) -> Tensor:
    """Return scores minus the mean of their prompt group, divided by its std + 1e-6 if `by_std`."""
    centred = groups.centre_B(scores_B)
    return centred / (groups.std_G(scores_B)[groups.index_B] + STD_EPSILON) if by_std else centred


def dr_grpo(
    token_level_rewards_BT: Tensor, response_mask_BT: Tensor, groups: Groups
) -> tuple[Tensor, Tensor]:
    """Compute Dr.GRPO advantages (arXiv 2503.20783): A_i = r_i − mean r.

    The paper combines them with the aggregation `seq-mean-token-sum-norm`, which does not divide
    by the length of the response.
    """
    return grpo(token_level_rewards_BT, response_mask_BT, groups, norm_adv_by_std=False)


def grpo_passk(
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups: Groups,
    *,
    norm_adv_by_std: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute pass@k advantages (arXiv 2503.19595): only the best sample of a prompt group has one.

    A_best = (r_best − r_second) / (std r + 1e-6), and 0 for all others. If two samples share the
    best reward, all advantages of the prompt group are 0.

    Args:
        norm_adv_by_std: False omits the division.

    Raises:
        GroupError: a prompt group has a single member.
    """
    require_group_size(groups, 2, "grpo_passk")
    scores = sequence_scores(token_level_rewards_BT, response_mask_BT)
    best = groups.extreme_G(scores, largest=True)
    is_best = (scores == best[groups.index_B]) & groups.member_B
    # The second-best reward is the largest one among the members that are not the best.
    others = Groups(groups.index_B, groups.member_B & ~is_best, groups.num_groups)
    second = others.extreme_G(scores, largest=True)
    unique = (groups.sum_G(is_best) == 1)[groups.index_B] & is_best
    lead = (best - second)[groups.index_B].masked_fill(~unique, 0.0)
    if norm_adv_by_std:
        lead = lead / (groups.std_G(scores)[groups.index_B] + STD_EPSILON)
    return _to_tokens(lead, token_level_rewards_BT, response_mask_BT)


def rloo(
    token_level_rewards_BT: Tensor, response_mask_BT: Tensor, groups: Groups
) -> tuple[Tensor, Tensor]:
    """Compute leave-one-out advantages (RLOO, arXiv 2402.14740).

    A_i = r_i − mean of the other r = n/(n−1)·(r_i − mean r).
    """
    scores = sequence_scores(token_level_rewards_BT, response_mask_BT)
    count = groups.count_G()
    # Groups of one have centred reward 0, so the clamp only avoids a division by 0.
    factor = count / (count - 1).clamp(min=1)
    return _to_tokens(
        groups.centre_B(scores) * factor[groups.index_B], token_level_rewards_BT, response_mask_BT
    )


def opo(
    token_level_rewards_BT: Tensor, response_mask_BT: Tensor, groups: Groups
) -> tuple[Tensor, Tensor]:
    """Compute OPO advantages (arXiv 2505.23585), whose baseline weights samples by length.

    A_i = r_i − Σ_j l_j·r_j / Σ_j l_j, with l the number of generated tokens.
    """
    scores = sequence_scores(token_level_rewards_BT, response_mask_BT)
    lengths = to_bool_mask(response_mask_BT).sum(-1).double()
    # Subtracting the mean first does not change A. It makes A exactly 0 for equal rewards, where
    # Σ l·r / Σ l differs from r by rounding.
    centred = groups.centre_B(scores)
    shift = groups.sum_G(lengths * centred) / groups.sum_G(lengths).clamp(min=1)
    return _to_tokens(centred - shift[groups.index_B], token_level_rewards_BT, response_mask_BT)


def gpg(
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups: Groups,
    *,
    f_norm: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute GPG advantages (arXiv 2504.02546): A_i = α·(r_i − mean r) / F_norm, α = B / (B − M).

    M counts the samples of zero-variance groups, which have gradient 0. α keeps the size of the
    step independent of their number: with 4 samples of which 2 are in such a group, α = 2.

    Raises:
        AlgorithmError: an F_norm that is not above 0, or not finite.
    """
    if not 0 < f_norm < math.inf:
        raise AlgorithmError(f"`f_norm` must be above 0 and finite, but received {f_norm}.")
    scores = sequence_scores(token_level_rewards_BT, response_mask_BT)
    nonzero = (groups.nonzero_variance_G(scores)[groups.index_B] & groups.member_B).sum()
    alpha = groups.member_B.sum() / nonzero.clamp(min=1)
    return _to_tokens(
        groups.centre_B(scores) * (alpha / f_norm), token_level_rewards_BT, response_mask_BT
    )


def reinforce_plus_plus_baseline(
    token_level_rewards_BT: Tensor,
    response_mask_BT: Tensor,
    groups: Groups,
    *,
    whiten_advantages: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute REINFORCE++-baseline advantages (arXiv 2501.03262).

    A = whiten(r_i − mean r), whitened over the generated tokens of the batch.

    Args:
        whiten_advantages: False omits the whitening; None whitens.
    """
    scores = sequence_scores(token_level_rewards_BT, response_mask_BT)
    advantages, _ = _to_tokens(groups.centre_B(scores), token_level_rewards_BT, response_mask_BT)
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
    """Compute GDPO advantages (arXiv 2601.05242): normalise each reward component separately.

    A_i = Σ_k w_k·(r_ik − mean r_k) / (std r_k + 1e-6), then whitened over the samples of the batch.
    Whitening over samples instead of tokens keeps long responses from weighing more.

    Args:
        reward_components_BK: one column per component.
        norm_adv_by_std: False omits the division.
        whiten_advantages: False omits the whitening; None whitens.
        reward_weights: w, K numbers; None: all 1.

    Raises:
        ShapeError: the components do not have B rows, or `reward_weights` not K numbers.
        NonFiniteError.
    """
    mask = to_bool_mask(response_mask_BT)
    weights = _component_weights(reward_components_BK, mask, reward_weights)
    components = reward_components_BK.detach().double()
    components = components.masked_fill(~groups.member_B[:, None], 0.0)
    require_finite(reward_components=components)
    total = torch.zeros_like(components[:, 0])
    for column, weight in enumerate(weights):
        total += weight * _normalised_B(components[:, column], groups, norm_adv_by_std)
    if whiten_advantages is not False:
        total = whiten_selected(total, groups.member_B)
    return _to_tokens(total, reward_components_BK, mask)


def _component_weights(
    reward_components_BK: Tensor, mask_BT: Tensor, reward_weights: list[float] | None
) -> list[float]:
    """Return one weight per component. Raises `ShapeError` if the shapes do not agree."""
    if reward_components_BK.dim() != 2 or reward_components_BK.shape[0] != mask_BT.shape[0]:
        raise ShapeError(
            f"`reward_components` must have shape [{mask_BT.shape[0]}, K], but has shape "
            f"{list(reward_components_BK.shape)}.",
            tensor="reward_components",
            got=tuple(reward_components_BK.shape),
        )
    number = reward_components_BK.shape[1]
    weights = [1.0] * number if reward_weights is None else reward_weights
    if len(weights) != number:
        raise ShapeError(
            f"`reward_weights` has {len(weights)} numbers, but there are {number} reward "
            f"components; give one weight per component.",
            tensor="reward_weights",
            expected=number,
            got=len(weights),
        )
    return weights
