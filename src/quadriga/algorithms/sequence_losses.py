"""Policy losses with one ratio per response. Shapes: B samples, T tokens.

Each generated token has the loss of its response. Aggregated by `seq-mean-token-mean`, each
response counts once, as in the papers. Conventions: see `clipped_losses.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quadriga.algorithms.aggregation import Partial
from quadriga.algorithms.clipped_losses import (
    LOG_RATIO_LIMIT,
    PolicyLoss,
    masked_log_ratio,
    ratio_metrics,
    require_clip,
)


def _mean_B1(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean over each response, [B, 1]. `values_BT` must be 0 outside the mask."""
    lengths = mask_BT.sum(-1, keepdim=True).clamp(min=1)
    return values_BT.sum(-1, keepdim=True) / lengths


def _clipped(
    ratio: Tensor,
    advantages_BT: Tensor,
    log_ratio_BT: Tensor,
    mask_BT: Tensor,
    low: float,
    high: float,
) -> PolicyLoss:
    """Compute max(−A·s, −A·clip(s, 1−low, 1+high)) with s = `ratio`, [B, 1] or [B, T]."""
    advantages = advantages_BT.masked_fill(~mask_BT, 0)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    metrics = ratio_metrics(log_ratio_BT, mask_BT)
    metrics["pg_clipfrac"] = Partial.mean((clipped > unclipped).float(), mask_BT)
    return PolicyLoss(torch.maximum(unclipped, clipped), metrics)


# One response of two tokens with token ratios 4 and 1 and advantages 1 and 3, no clipping:
#
#     log r            1.386   0          mean 0.693, so s = exp(0.693) = 2 = √(4 · 1)
#     loss             −2      −6         −A·s, the same for `gspo` and `gspo_token`
#
#     gradient of the summed loss by log π of each token:
#     gspo             −4      −4         ∂s/∂log π_t = s/2 for both tokens: −(1 + 3)·2/2
#     gspo_token       −2      −6         −A_t·s: each token's own advantage
def gspo(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    clip_ratio_low: float = 3e-4,
    clip_ratio_high: float = 4e-4,
) -> PolicyLoss:
    """Compute the GSPO loss (arXiv 2507.18071).

    The ratio of a response is the geometric mean of its token ratios:

    s_i = exp((1/|y_i|) Σ_t log(π/π_old));  ℓ_it = max(−A·s_i, −A·clip(s_i, 1−ε_low, 1+ε_high)).

    Raises:
        AlgorithmError: a negative clip range.
    """
    require_clip("gspo", clip_ratio_low, clip_ratio_high)
    log_ratio = masked_log_ratio(log_prob_BT, old_log_prob_BT, response_mask_BT)
    mean = _mean_B1(log_ratio, response_mask_BT)
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
    """Compute the GSPO-token loss (arXiv 2507.18071): GSPO with s_it = sg[s_i]·π/sg[π].

    The value is as in `gspo`. The gradient reaches each token through its own log-probability,
    so that the tokens of one response may have different advantages.

    Raises:
        AlgorithmError: a negative clip range.
    """
    require_clip("gspo_token", clip_ratio_low, clip_ratio_high)
    log_ratio = masked_log_ratio(log_prob_BT, old_log_prob_BT, response_mask_BT)
    mean = _mean_B1(log_ratio.detach(), response_mask_BT)
    log_s = mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # log s_it = sg[log s_i] + log π − sg[log π]. The difference is 0 in value and has gradient 1.
    ratio = (log_s + (log_ratio - log_ratio.detach())).exp()
    return _clipped(
        ratio, advantages_BT, log_ratio, response_mask_BT, clip_ratio_low, clip_ratio_high
    )


# One response of two tokens with log r = 0.6 and −0.5, clip range ±0.4. The exponent of a token is
# `bounded` = sgn A·d_t:
#
#     A > 0:   min(log r, clip(log r))   =    0.4   −0.5     mean −0.05    ratio 0.951
#     A < 0:   max(log r, clip(log r))   =    0.6   −0.4     mean  0.10    ratio 1.105
#
# As in PPO, a token is clipped only on the side to which its advantage moves it.
def geo_mean(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    clip_ratio_low: float = 0.4,
    clip_ratio_high: float = 0.4,
) -> PolicyLoss:
    """Compute the GMPO loss (arXiv 2507.20673): geometric mean of token ratios, clipped as logs.

    d_t = min(sgn A·log r_t, sgn A·clip(log r_t, −ε_low, ε_high));
    ℓ_i = −A·exp(sgn A·(1/|y_i|) Σ_t d_t). The clip range is one of log-ratios: 0.4 is (e^−0.4,
    e^0.4). A is the mean advantage of the response's tokens (in the paper, a response has one A).

    Raises:
        AlgorithmError: a negative clip range.
    """
    require_clip("geo_mean", clip_ratio_low, clip_ratio_high)
    log_ratio = masked_log_ratio(log_prob_BT, old_log_prob_BT, response_mask_BT)
    advantages = advantages_BT.masked_fill(~response_mask_BT, 0)
    sign = torch.sign(advantages)
    clamped = log_ratio.clamp(-clip_ratio_low, clip_ratio_high)
    bounded = sign * torch.minimum(sign * log_ratio, sign * clamped)
    mean = _mean_B1(bounded, response_mask_BT)
    ratio = mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    loss = -_mean_B1(advantages, response_mask_BT) * ratio
    metrics = ratio_metrics(log_ratio, response_mask_BT)
    outside = log_ratio != clamped
    metrics["pg_clipfrac"] = Partial.mean((outside & (sign > 0)).float(), response_mask_BT)
    metrics["pg_clipfrac_lower"] = Partial.mean((outside & (sign < 0)).float(), response_mask_BT)
    return PolicyLoss(loss * response_mask_BT, metrics)
