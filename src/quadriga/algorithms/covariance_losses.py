"""Clip-Cov and KL-Cov: restrain the few tokens that drive entropy down (arXiv 2505.22617).

Which tokens those are depends on the whole batch: on its means, and on its largest covariances.
A micro-batch cannot know them, so they are chosen once, by `select_*`, over the whole batch, with
the log-probabilities of the policy at the start of the step, and travel as a field
(`selected_BT`). Deviation from the paper, which takes those of the current policy: equal in the
first optimizer step, and the gradient no longer depends on how the batch is split.
Shapes: B samples, T tokens. Conventions: see `clipped_losses.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quadriga.algorithms.clipped_losses import (
    PolicyLoss,
    bounded_ratio,
    masked_log_ratio,
    ppo_clip,
    ratio_metrics,
)
from quadriga.algorithms.masked import masked_mean
from quadriga.algorithms.partial import Partial
from quadriga.errors import AlgorithmError

NO_DUAL_CLIP = 1e9


def token_covariance(log_prob_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(log π − mean log π)·(A − mean A), means over the masked tokens; 0 elsewhere."""
    log_prob = log_prob_BT.detach().double().masked_fill(~mask_BT, 0)
    advantages = advantages_BT.detach().double().masked_fill(~mask_BT, 0)
    centred = (log_prob - masked_mean(log_prob, mask_BT)) * (
        advantages - masked_mean(advantages, mask_BT)
    )
    return centred.masked_fill(~mask_BT, 0)


def _share(ratio: float, mask_BT: Tensor, name: str) -> int:
    if not 0 < ratio <= 1:
        raise AlgorithmError(f"`{name}` is a share of the tokens, above 0, at most 1; got {ratio}.")
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
    """bool [B, T]: `clip_cov_ratio` of all tokens, drawn from those with covariance in (lb, ub)."""
    number = _share(clip_cov_ratio, response_mask_BT, "clip_cov_ratio")
    covariance = token_covariance(old_log_prob_BT, advantages_BT, response_mask_BT)
    inside = (covariance > clip_cov_lb) & (covariance < clip_cov_ub) & response_mask_BT
    candidates = inside.flatten().nonzero()[:, 0]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(candidates), generator=generator)[:number]
    return _flags(candidates[order.to(candidates.device)], response_mask_BT)


def select_kl_cov(
    old_log_prob_BT: Tensor,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    kl_cov_ratio: float = 2e-4,
) -> Tensor:
    """bool [B, T]: the `kl_cov_ratio` of all tokens whose covariance is largest."""
    number = _share(kl_cov_ratio, response_mask_BT, "kl_cov_ratio")
    covariance = token_covariance(old_log_prob_BT, advantages_BT, response_mask_BT)
    tokens = response_mask_BT.flatten().nonzero()[:, 0]
    number = min(number, len(tokens))
    largest = covariance.flatten()[tokens].topk(number).indices
    return _flags(tokens[largest], response_mask_BT)


def _flags(positions: Tensor, mask_BT: Tensor) -> Tensor:
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
    """Clip-Cov (arXiv 2505.22617): the selected tokens lose their gradient.

    ℓ = max(−A·r, −A·clip(r)), 0 at the selected tokens. No dual clip.
    """
    inner = ppo_clip(
        log_prob_BT,
        old_log_prob_BT,
        advantages_BT,
        response_mask_BT,
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_c=NO_DUAL_CLIP,
    )
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
    """KL-Cov (arXiv 2505.22617): the selected tokens are held near the old policy.

    ℓ = −A·r, plus β·|log π − log π_old| at the selected tokens. No clip.
    """
    log_ratio = masked_log_ratio(log_prob_BT, old_log_prob_BT, response_mask_BT)
    advantages = advantages_BT.masked_fill(~response_mask_BT, 0)
    pull = ppo_kl_coef * log_ratio.abs() * selected_BT
    metrics = ratio_metrics(log_ratio, response_mask_BT)
    metrics["cov_selected"] = Partial.mean(selected_BT.float(), response_mask_BT)
    return PolicyLoss(-advantages * bounded_ratio(log_ratio) + pull, metrics)
