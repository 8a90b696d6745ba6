"""Policy losses whose ratio belongs to the whole response. Shapes: B samples, T tokens.

The loss of a sequence stands at each of its tokens; aggregated by `seq-mean-token-mean`, each
sequence counts once, as the papers have it. Conventions: see `clipped_losses.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quadriga.algorithms.clipped_losses import (
    LOG_RATIO_LIMIT,
    PolicyLoss,
    masked_log_ratio,
    ratio_metrics,
    require_clip,
)
from quadriga.algorithms.partial import Partial


def _mean_log_ratio_B1(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(1/|y|) Σ_t log(π/π_old), [B, 1]."""
    lengths = mask_BT.sum(-1, keepdim=True).clamp(min=1)
    return log_ratio_BT.sum(-1, keepdim=True) / lengths


def _clipped(
    ratio: Tensor,
    advantages_BT: Tensor,
    log_ratio_BT: Tensor,
    mask_BT: Tensor,
    low: float,
    high: float,
) -> PolicyLoss:
    advantages = advantages_BT.masked_fill(~mask_BT, 0)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    metrics = ratio_metrics(log_ratio_BT, mask_BT)
    metrics["pg_clipfrac"] = Partial.mean((clipped > plain).float(), mask_BT)
    return PolicyLoss(torch.maximum(plain, clipped), metrics)


def gspo(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    clip_ratio_low: float = 3e-4,
    clip_ratio_high: float = 4e-4,
) -> PolicyLoss:
    """GSPO (arXiv 2507.18071): the ratio is the geometric mean over the response.

    s_i = exp((1/|y_i|) Σ_t log(π/π_old));  ℓ_it = max(−A·s_i, −A·clip(s_i, 1−ε_low, 1+ε_high)).
    """
    require_clip("gspo", clip_ratio_low, clip_ratio_high)
    log_ratio = masked_log_ratio(log_prob_BT, old_log_prob_BT, response_mask_BT)
    mean = _mean_log_ratio_B1(log_ratio, response_mask_BT)
    ratio = mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return _clipped(
        ratio, advantages_BT, log_ratio, response_mask_BT, clip_ratio_low, clip_ratio_high
    )


def gspo_token(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    clip_ratio_low: float = 3e-4,
    clip_ratio_high: float = 4e-4,
) -> PolicyLoss:
    """GSPO-token (arXiv 2507.18071): s_it = sg[s_i]·π/sg[π].

    The same value as `gspo`; the gradient reaches each token through its own log-probability, so
    that tokens of one response may have different advantages.
    """
    require_clip("gspo_token", clip_ratio_low, clip_ratio_high)
    log_ratio = masked_log_ratio(log_prob_BT, old_log_prob_BT, response_mask_BT)
    mean = _mean_log_ratio_B1(log_ratio.detach(), response_mask_BT)
    sequence = mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = (sequence + (log_ratio - log_ratio.detach())).exp()
    return _clipped(
        ratio, advantages_BT, log_ratio, response_mask_BT, clip_ratio_low, clip_ratio_high
    )


def geo_mean(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    clip_ratio_low: float = 0.4,
    clip_ratio_high: float = 0.4,
) -> PolicyLoss:
    """GMPO (arXiv 2507.20673): the geometric mean of token ratios, clipped in log space.

    d_t = min(sgn A·log r_t, sgn A·clip(log r_t, −ε_low, ε_high));
    ℓ_i = −A·exp(sgn A·(1/|y_i|) Σ_t d_t). The clip range is one of log-ratios: 0.4 is (e^−0.4,
    e^0.4). A is the mean advantage of the response's tokens (the paper has one a response).
    """
    require_clip("geo_mean", clip_ratio_low, clip_ratio_high)
    log_ratio = masked_log_ratio(log_prob_BT, old_log_prob_BT, response_mask_BT)
    advantages = advantages_BT.masked_fill(~response_mask_BT, 0)
    sign = torch.sign(advantages)
    clamped = log_ratio.clamp(-clip_ratio_low, clip_ratio_high)
    bounded = sign * torch.minimum(sign * log_ratio, sign * clamped)
    mean = _mean_log_ratio_B1(bounded, response_mask_BT)
    ratio = mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    loss = -_mean_log_ratio_B1(advantages, response_mask_BT) * ratio
    metrics = ratio_metrics(log_ratio, response_mask_BT)
    outside = log_ratio != clamped
    metrics["pg_clipfrac"] = Partial.mean((outside & (sign > 0)).float(), response_mask_BT)
    metrics["pg_clipfrac_lower"] = Partial.mean((outside & (sign < 0)).float(), response_mask_BT)
    return PolicyLoss(loss * response_mask_BT, metrics)
