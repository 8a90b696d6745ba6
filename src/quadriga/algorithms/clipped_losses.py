"""Policy losses that bound the ratio token by token. Shapes: B samples, T tokens.

Conventions of every policy loss here: `log_prob_BT` carries the gradient; the others are data.
The mask is bool. All differences are taken under the mask, so what lies outside it reaches
neither the loss nor the gradient. Each returns a `PolicyLoss`: the loss of each token (0 outside
the mask) and metrics as partial sums. Aggregation is a separate step (`aggregation.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quadriga.algorithms.partial import Partial
from quadriga.errors import AlgorithmError

# exp(±20) is far outside any trust region and far inside float32.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class PolicyLoss:
    """Loss of each token, and what happened on the way.

    Attributes:
        loss_BT: float, 0 outside the mask.
        metrics: name → `Partial`.
    """

    loss_BT: Tensor
    metrics: dict[str, Partial] = field(default_factory=dict)


def masked_log_ratio(log_prob_BT: Tensor, old_log_prob_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log π − log π_old under the mask, 0 elsewhere (value and gradient)."""
    return (log_prob_BT - old_log_prob_BT).masked_fill(~mask_BT, 0)


def bounded_ratio(log_ratio_BT: Tensor) -> Tensor:
    """exp of the log-ratio, held within e^±20."""
    return log_ratio_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def ratio_metrics(log_ratio_BT: Tensor, mask_BT: Tensor) -> dict[str, Partial]:
    """What every ratio-based loss reports: the k1 estimate of KL(π_old‖π) and the ratio's range."""
    ratio = bounded_ratio(log_ratio_BT.detach())
    return {
        "ppo_kl": Partial.mean(-log_ratio_BT, mask_BT),
        "ratio_max": Partial.max(ratio, mask_BT),
        "ratio_min": Partial.min(ratio, mask_BT),
    }


def require_clip(name: str, low: float, high: float) -> None:
    """Raise `AlgorithmError` unless both clip ranges are at least 0."""
    if not (low >= 0 and high >= 0):
        raise AlgorithmError(
            f"`{name}` wants clip ranges of at least 0, but got low {low} and high {high}."
        )


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
    """Clipped surrogate (arXiv 1707.06347, eq. 7), asymmetric (DAPO, arXiv 2503.14476),
    with dual clip (arXiv 1912.09729).

    r = π/π_old;  ℓ = max(−A·r, −A·clip(r, 1−ε_low, 1+ε_high));  where A < 0: ℓ = min(ℓ, −A·c).
    """
    require_clip("ppo_clip", clip_ratio_low, clip_ratio_high)
    if clip_ratio_c <= 1.0:
        raise AlgorithmError(
            f"`clip_ratio_c` bounds ratios above 1, so it must be above 1, but is {clip_ratio_c}."
        )
    log_ratio = masked_log_ratio(log_prob_BT, old_log_prob_BT, response_mask_BT)
    advantages = advantages_BT.masked_fill(~response_mask_BT, 0)
    ratio = bounded_ratio(log_ratio)
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    surrogate = torch.maximum(plain, clipped)
    ceiling = -advantages * clip_ratio_c
    loss = torch.where(advantages < 0, torch.minimum(surrogate, ceiling), surrogate)
    metrics = ratio_metrics(log_ratio, response_mask_BT)
    metrics["pg_clipfrac"] = Partial.mean((clipped > plain).float(), response_mask_BT)
    beyond = (surrogate > ceiling) & (advantages < 0)
    metrics["pg_clipfrac_lower"] = Partial.mean(beyond.float(), response_mask_BT)
    return PolicyLoss(loss, metrics)


def cispo(
    log_prob_BT: Tensor,
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> PolicyLoss:
    """CISPO (arXiv 2506.13585): the clipped ratio is a weight, not a gate.

    ℓ = −sg[clip(r, 1−ε_low, 1+ε_high)]·A·log π, so that every token keeps a gradient.
    """
    require_clip("cispo", clip_ratio_low, clip_ratio_high)
    log_ratio = masked_log_ratio(log_prob_BT, old_log_prob_BT, response_mask_BT)
    ratio = bounded_ratio(log_ratio.detach())
    weight = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    pushed = (weight * advantages_BT).masked_fill(~response_mask_BT, 0)
    loss = (-pushed * log_prob_BT).masked_fill(~response_mask_BT, 0)
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
    """SAPO (arXiv 2511.20347): a smooth gate in place of the clip.

    ℓ = −A·(4/τ)·σ(τ·(r − 1)), τ = τ_pos where A > 0, else τ_neg. At r = 1 the slope is A.
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise AlgorithmError(f"`tau_pos` and `tau_neg` must be above 0: {tau_pos}, {tau_neg}.")
    log_ratio = masked_log_ratio(log_prob_BT, old_log_prob_BT, response_mask_BT)
    advantages = advantages_BT.masked_fill(~response_mask_BT, 0)
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(advantages.dtype)
    gate = torch.sigmoid(tau * (bounded_ratio(log_ratio) - 1)) * (4 / tau)
    return PolicyLoss(-advantages * gate, ratio_metrics(log_ratio, response_mask_BT))


def policy_gradient(
    log_prob_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
) -> PolicyLoss:
    """Plain policy gradient (REINFORCE, Williams 1992; GPG, arXiv 2504.02546): ℓ = −A·log π.

    No ratio: right only for the first optimizer step after a rollout.
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
    """Decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298).

    The clip is around the proximal policy (`old_log_prob`); a fixed weight corrects for the
    policy that sampled:  ℓ = (π_old/π_rollout) · ppo_clip(π/π_old).
    `behaviour_weight_cap` drops (weight 0) tokens whose weight is above it.
    """
    inner = ppo_clip(
        log_prob_BT,
        old_log_prob_BT,
        advantages_BT,
        response_mask_BT,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_c=clip_ratio_c,
    )
    with torch.no_grad():
        behaviour = masked_log_ratio(old_log_prob_BT, rollout_log_prob_BT, response_mask_BT)
        weight = bounded_ratio(behaviour)
        if behaviour_weight_cap is not None:
            weight = weight.masked_fill(weight > behaviour_weight_cap, 0)
    metrics = dict(inner.metrics)
    metrics["behaviour_weight"] = Partial.mean(weight, response_mask_BT)
    metrics["behaviour_weight_max"] = Partial.max(weight, response_mask_BT)
    return PolicyLoss(inner.loss_BT * weight, metrics)
