"""Policy losses with one ratio per token or per response. Shapes: B samples, T tokens.

Conventions of every policy loss in this package:

- `log_prob_BT` carries the gradient. The other tensors are constants.
- The mask is bool. Differences of log-probabilities are set to 0 outside the mask, so values there
  reach neither the loss nor the gradient.
- The result is a `PolicyLoss`: the loss of each token (0 outside the mask) and metrics as
  `Partial`s. Aggregation is a separate step (`aggregation.py`).
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quadriga.algorithms.aggregation import Partial
from quadriga.errors import AlgorithmError

# exp(20) = 4.9e8 is far outside any trust region and far inside the range of float32 (3.4e38).
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of each token with its metrics.

    Attributes:
        loss_BT: float, 0 outside the mask.
        metrics: name → `Partial`.
    """

    loss_BT: Tensor
    metrics: dict[str, Partial] = field(default_factory=dict)


def masked_log_ratio(log_prob_BT: Tensor, old_log_prob_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return log π − log π_old under the mask, and 0 (with gradient 0) elsewhere."""
    return (log_prob_BT - old_log_prob_BT).masked_fill(~mask_BT, 0)


def bounded_ratio(log_ratio_BT: Tensor) -> Tensor:
    """Return exp of the log-ratio, with the log-ratio clamped to ±20."""
    return log_ratio_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def ratio_metrics(log_ratio_BT: Tensor, mask_BT: Tensor) -> dict[str, Partial]:
    """Return the metrics of every ratio-based loss: k1 estimate of KL(π_old‖π), range of r."""
    ratio = bounded_ratio(log_ratio_BT.detach())
    return {
        "ppo_kl": Partial.mean(-log_ratio_BT, mask_BT),
        "ratio_max": Partial.max(ratio, mask_BT),
        "ratio_min": Partial.min(ratio, mask_BT),
    }


def require_clip(name: str, low: float, high: float) -> None:
    """Raise `AlgorithmError` unless both clip ranges are at least 0 (NaN is refused)."""
    if not (low >= 0 and high >= 0):
        raise AlgorithmError(
            f"`{name}` needs `clip_ratio_low` and `clip_ratio_high` of at least 0, but received "
            f"{low} and {high}."
        )


# The four cases of `ppo_clip`, with ε_low = 0.2, ε_high = 0.28, c = 3:
#
#       A     r     −A·r   −A·clip(r)    max    −A·c     ℓ
#     +2.0   1.5   −3.00     −2.56     −2.56     —     −2.56   clipped: r left the range upwards
#     +2.0   0.5   −1.00     −1.60     −1.00     —     −1.00   not clipped: A > 0 raises r again
#     −2.0   0.5    1.00      1.60      1.60    6.0     1.60   clipped: r left the range downwards
#     −2.0   9.0   18.00      2.56     18.00    6.0     6.00   dual clip: bounds the loss at A·c
#
# A clipped token has a constant loss and therefore gradient 0. Without the dual clip, the last row
# has gradient −A·r = 18 with respect to log π: one token that became 9 times as likely since the
# rollout would dominate the mini-batch.
def ppo_clip(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> PolicyLoss:
    """Compute PPO's clipped surrogate loss (arXiv 1707.06347, eq. 7).

    The clip range is asymmetric (DAPO, arXiv 2503.14476). The dual clip is from
    arXiv 1912.09729.

    r = π/π_old;  ℓ = max(−A·r, −A·clip(r, 1−ε_low, 1+ε_high));  where A < 0: ℓ = min(ℓ, −A·c).

    Raises:
        AlgorithmError: a negative clip range, or a `clip_ratio_c` that is not above 1.
    """
    require_clip("ppo_clip", clip_ratio_low, clip_ratio_high)
    if clip_ratio_c <= 1.0:
        raise AlgorithmError(
            f"`clip_ratio_c` is an upper bound of the ratio and must be above 1, but received "
            f"{clip_ratio_c}."
        )
    log_ratio = masked_log_ratio(log_prob_BT, old_log_prob_BT, response_mask_BT)
    advantages = advantages_BT.masked_fill(~response_mask_BT, 0)
    ratio = bounded_ratio(log_ratio)
    inner = _clipped(
        ratio, advantages_BT, log_ratio, response_mask_BT, clip_ratio_low, clip_ratio_high
    )
    dual_bound = -advantages * clip_ratio_c
    dual_clipped = (inner.loss_BT > dual_bound) & (advantages < 0)
    loss = torch.where(advantages < 0, torch.minimum(inner.loss_BT, dual_bound), inner.loss_BT)
    lower = Partial.mean(dual_clipped.float(), response_mask_BT)
    return PolicyLoss(loss, {**inner.metrics, "pg_clipfrac_lower": lower})


def cispo(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> PolicyLoss:
    """Compute the CISPO loss (arXiv 2506.13585): the clipped ratio is a constant weight.

    ℓ = −sg[clip(r, 1−ε_low, 1+ε_high)]·A·log π. Every token keeps a gradient, unlike in PPO, where
    a clipped token has gradient 0.

    Raises:
        AlgorithmError: a negative clip range.
    """
    require_clip("cispo", clip_ratio_low, clip_ratio_high)
    log_ratio = masked_log_ratio(log_prob_BT, old_log_prob_BT, response_mask_BT)
    ratio = bounded_ratio(log_ratio.detach())
    weight = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    # Both fills are needed. Without the first, the backward pass computes 0 · (NaN advantage);
    # without the second, the forward pass computes 0 · (NaN log-probability).
    weighted_advantages = (weight * advantages_BT).masked_fill(~response_mask_BT, 0)
    loss = (-weighted_advantages * log_prob_BT).masked_fill(~response_mask_BT, 0)
    metrics = ratio_metrics(log_ratio, response_mask_BT)
    metrics["pg_clipfrac"] = Partial.mean((ratio != weight).float(), response_mask_BT)
    return PolicyLoss(loss, metrics)


def sapo(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> PolicyLoss:
    """Compute the SAPO loss (arXiv 2511.20347): a sigmoid gate replaces the clip.

    ℓ = −A·(4/τ)·σ(τ·(r − 1)), τ = τ_pos where A > 0, else τ_neg.

    Raises:
        AlgorithmError: a temperature that is not above 0, or not finite.
    """
    if not (0 < tau_pos < math.inf and 0 < tau_neg < math.inf):
        raise AlgorithmError(
            "`tau_pos` and `tau_neg` must be above 0 and finite, but received "
            f"{tau_pos} and {tau_neg}."
        )
    log_ratio = masked_log_ratio(log_prob_BT, old_log_prob_BT, response_mask_BT)
    advantages = advantages_BT.masked_fill(~response_mask_BT, 0)
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(advantages.dtype)
    # σ'(0) = 1/4, so the factor 4/τ makes the derivative by r exactly −A at r = 1, as in PPO.
    gate = torch.sigmoid(tau * (bounded_ratio(log_ratio) - 1)) * (4 / tau)
    return PolicyLoss(-advantages * gate, ratio_metrics(log_ratio, response_mask_BT))


def policy_gradient(
    log_prob_BT: Tensor, advantages_BT: Tensor, response_mask_BT: Tensor
) -> PolicyLoss:
    """Compute the policy-gradient loss ℓ = −A·log π.

    Sources: REINFORCE (Williams 1992), GPG (arXiv 2504.02546). The loss has no ratio, so it
    is correct only for the first optimizer step after a rollout.
    """
    advantages = advantages_BT.masked_fill(~response_mask_BT, 0)
    return PolicyLoss((-advantages * log_prob_BT).masked_fill(~response_mask_BT, 0))


def decoupled_ppo(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    rollout_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
    behaviour_weight_cap: float | None = None,
) -> PolicyLoss:
    """Compute the decoupled PPO loss (arXiv 2110.00641; AReaL, arXiv 2505.24298).

    The clip range is around the proximal policy π_old (`old_log_prob_BT`). A constant weight
    corrects for the behaviour policy π_rollout, which sampled the tokens:

    ℓ = (π_old/π_rollout) · ppo_clip(π/π_old).

    Args:
        behaviour_weight_cap: tokens with a weight above it get weight 0; None keeps all tokens.

    Raises:
        AlgorithmError: as in `ppo_clip`, and for a cap that is not above 0.
    """
    if behaviour_weight_cap is not None and not behaviour_weight_cap > 0:
        raise AlgorithmError(
            f"`behaviour_weight_cap` must be above 0, but received {behaviour_weight_cap}."
        )
    inner = ppo_clip(
        log_prob_BT, old_log_prob_BT, advantages_BT, response_mask_BT,
        clip_ratio_low=clip_ratio_low, clip_ratio_high=clip_ratio_high, clip_ratio_c=clip_ratio_c,
    )  # fmt: skip
    with torch.no_grad():
        behaviour = masked_log_ratio(old_log_prob_BT, rollout_log_prob_BT, response_mask_BT)
        weight = bounded_ratio(behaviour)
        if behaviour_weight_cap is not None:
            weight = weight.masked_fill(weight > behaviour_weight_cap, 0)
    metrics = dict(inner.metrics)
    metrics["behaviour_weight"] = Partial.mean(weight, response_mask_BT)
    metrics["behaviour_weight_max"] = Partial.max(weight, response_mask_BT)
    return PolicyLoss(inner.loss_BT * weight, metrics)


# Losses with one ratio per response: each generated token has the loss of its response. Aggregated
# by `seq-mean-token-mean`, each response counts once, as in the papers.


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
    ratio = bounded_ratio(_mean_B1(log_ratio, response_mask_BT))
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
    # log s_it = sg[log s_i] + log π − sg[log π]. The difference is 0 in value and has gradient 1.
    s_B1 = bounded_ratio(_mean_B1(log_ratio.detach(), response_mask_BT))
    ratio = s_B1 * (log_ratio - log_ratio.detach()).exp()
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
    ratio = bounded_ratio(_mean_B1(bounded, response_mask_BT))
    loss = -_mean_B1(advantages, response_mask_BT) * ratio
    metrics = ratio_metrics(log_ratio, response_mask_BT)
    outside = log_ratio != clamped
    metrics["pg_clipfrac"] = Partial.mean((outside & (sign > 0)).float(), response_mask_BT)
    metrics["pg_clipfrac_lower"] = Partial.mean((outside & (sign < 0)).float(), response_mask_BT)
    return PolicyLoss(loss * response_mask_BT, metrics)
