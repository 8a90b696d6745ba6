"""Clip-Cov and KL-Cov (arXiv 2505.22617): limit the update of the tokens that reduce entropy.

These are the tokens where the covariance of log π and A is large. The covariance depends on the
means of the whole batch, which a micro-batch does not contain. `select_*` therefore chooses the
tokens once, over the whole batch, and the choice is a field of the batch (`selected_BT`).

Deviation from the paper: the covariance is computed with the policy at the start of the step
instead of the current policy. Both are equal in the first optimizer step. In return, the gradient
does not depend on how the batch is split.

Shapes: B samples, T tokens. Conventions: see `clipped_losses.py`.
"""

import math

import torch
from torch import Tensor

from quadriga.algorithms.aggregation import Partial
from quadriga.algorithms.clipped_losses import (
    PolicyLoss,
    bounded_ratio,
    masked_log_ratio,
    ppo_clip,
    ratio_metrics,
)
from quadriga.algorithms.tensors import masked_mean
from quadriga.errors import AlgorithmError

# Above exp(20), the largest ratio that `bounded_ratio` returns: the dual clip never applies.
NO_DUAL_CLIP = 1e9


# One response of three tokens, mean log π = −2, mean A = 1:
#
#     log π                −1     −2     −3
#     A                     3      1     −1
#     log π − mean          1      0     −1
#     A − mean              2      0     −2
#     covariance            2      0      2
#
# The first token is likely and is reinforced, the last one is unlikely and is suppressed. Both
# updates make the distribution sharper, so both have a large positive covariance.
def token_covariance(log_prob_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return (log π − mean log π)·(A − mean A), float64 [B, T], 0 outside the mask.

    The means run over all tokens under the mask.
    """
    log_prob = log_prob_BT.detach().double().masked_fill(~mask_BT, 0)
    advantages = advantages_BT.detach().double().masked_fill(~mask_BT, 0)
    centred = (log_prob - masked_mean(log_prob, mask_BT)) * (
        advantages - masked_mean(advantages, mask_BT)
    )
    return centred.masked_fill(~mask_BT, 0)


def _token_count(ratio: float, mask_BT: Tensor, name: str) -> int:
    """Return the fraction `ratio` of the tokens under the mask as a count, at least 1."""
    if not 0 < ratio <= 1:
        raise AlgorithmError(
            f"`{name}` is a fraction of the tokens and must be above 0 and at most 1, but "
            f"received {ratio}."
        )
    return max(1, int(ratio * int(mask_BT.sum())))


def select_clip_cov(
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    seed: int = 0,
) -> Tensor:
    """Draw tokens at random from those with a covariance in (`clip_cov_lb`, `clip_cov_ub`).

    Args:
        clip_cov_ratio: how many, as a fraction of all tokens; at least one token is drawn.
        seed: seed of the draw, so that every call with the same batch selects the same tokens.

    Returns:
        bool [B, T].

    Raises:
        AlgorithmError: a fraction out of range, or bounds between which no number is.
    """
    if not clip_cov_lb < clip_cov_ub:
        raise AlgorithmError(
            "`clip_cov_lb` must be below `clip_cov_ub`, but received "
            f"{clip_cov_lb} and {clip_cov_ub}: no covariance is between them."
        )
    number = _token_count(clip_cov_ratio, response_mask_BT, "clip_cov_ratio")
    covariance = token_covariance(old_log_prob_BT, advantages_BT, response_mask_BT)
    # Example above with bounds (1, 5): the band holds positions 0 and 2 of three tokens. With
    # clip_cov_ratio = 0.4, int(0.4 · 3) = 1 of the two is drawn.
    in_band = (covariance > clip_cov_lb) & (covariance < clip_cov_ub) & response_mask_BT
    candidates = in_band.flatten().nonzero()[:, 0]
    # The generator is on the CPU, so that the same tokens are drawn on every kind of device.
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(candidates), generator=generator)[:number]
    return _mask_of_positions(candidates[order.to(candidates.device)], response_mask_BT)


def select_kl_cov(
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    kl_cov_ratio: float = 2e-4,
) -> Tensor:
    """Select the tokens with the largest covariance.

    Args:
        kl_cov_ratio: how many, as a fraction of all tokens; at least one token is selected.

    Returns:
        bool [B, T].
    """
    number = _token_count(kl_cov_ratio, response_mask_BT, "kl_cov_ratio")
    covariance = token_covariance(old_log_prob_BT, advantages_BT, response_mask_BT)
    # `topk` sees only the tokens under the mask: the covariance outside it is 0, which is larger
    # than the covariance of many tokens.
    tokens = response_mask_BT.flatten().nonzero()[:, 0]
    number = min(number, len(tokens))
    largest = covariance.flatten()[tokens].topk(number).indices
    return _mask_of_positions(tokens[largest], response_mask_BT)


def _mask_of_positions(positions: Tensor, mask_BT: Tensor) -> Tensor:
    """Return bool [B, T], True at the given positions of the flattened mask."""
    flags = torch.zeros(mask_BT.numel(), dtype=torch.bool, device=mask_BT.device)
    flags[positions] = True
    return flags.view(mask_BT.shape)


def clip_cov(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    selected_BT: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> PolicyLoss:
    """Compute the Clip-Cov loss (arXiv 2505.22617): the selected tokens have no gradient.

    ℓ = max(−A·r, −A·clip(r)), and 0 at the selected tokens. There is no dual clip.

    Args:
        selected_BT: bool, from `select_clip_cov` over the whole batch.
    """
    inner = ppo_clip(
        log_prob_BT, old_log_prob_BT, advantages_BT, response_mask_BT,
        clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high, clip_ratio_c=NO_DUAL_CLIP,
    )  # fmt: skip
    metrics = {k: v for k, v in inner.metrics.items() if k != "pg_clipfrac_lower"}
    metrics["cov_selected"] = Partial.mean(selected_BT.float(), response_mask_BT)
    return PolicyLoss(inner.loss_BT.masked_fill(selected_BT, 0), metrics)


def kl_cov(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    selected_BT: Tensor,
    *,
    ppo_kl_coef: float = 1.0,
) -> PolicyLoss:
    """Compute the KL-Cov loss (arXiv 2505.22617): a KL penalty at the selected tokens.

    ℓ = −A·r, plus β·|log π − log π_old| at the selected tokens. There is no clip.

    Args:
        selected_BT: bool, from `select_kl_cov` over the whole batch.
        ppo_kl_coef: β.

    Raises:
        AlgorithmError: β is negative, which would reward a distance, or not finite.
    """
    if not 0 <= ppo_kl_coef < math.inf:
        raise AlgorithmError(
            f"`ppo_kl_coef` must be at least 0 and finite, but received {ppo_kl_coef}."
        )
    log_ratio = masked_log_ratio(log_prob_BT, old_log_prob_BT, response_mask_BT)
    advantages = advantages_BT.masked_fill(~response_mask_BT, 0)
    penalty = ppo_kl_coef * log_ratio.abs() * selected_BT
    metrics = ratio_metrics(log_ratio, response_mask_BT)
    metrics["cov_selected"] = Partial.mean(selected_BT.float(), response_mask_BT)
    return PolicyLoss(-advantages * bounded_ratio(log_ratio) + penalty, metrics)
