"""When the engine that samples and the engine that trains disagree. Shapes: B samples, T tokens.

Both hold the same weights, yet their log-probabilities differ (kernels, precision, a weight sync
that failed). w = π_train/π_rollout is what undoes it; here it is bounded, for each token or for
the whole response, by truncation (truncated importance sampling, Ionides 2008; V-trace, arXiv
1802.01561) or by leaving out, and the gap is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quadriga.algorithms.checks import (
    as_float,
    require_finite,
    require_matrix,
    require_same_shape,
    to_bool_mask,
)
from quadriga.algorithms.clipped_losses import LOG_RATIO_LIMIT
from quadriga.algorithms.registry import look_up
from quadriga.errors import AlgorithmError

# How a response's log-ratios become one: its likelihood ratio, or the mean a token of it.
LEVELS = {
    "token": "w_t = π_t/π_rollout,t",
    "sequence": "w = Π_t π_t/π_rollout,t, the same at each token",
    "geometric": "w = (Π_t π_t/π_rollout,t)^(1/|y|), the same at each token",
}
MODES = {
    "truncate": "min(w, upper); below `lower` (if given): lower",
    "mask": "tokens or responses with w outside [lower, upper] get weight 0",
}


@dataclass(frozen=True)
class ImportanceCorrection:
    """Weights for the policy loss.

    Attributes:
        weights_BT: float, ≥ 0, 0 outside `mask_BT`; no gradient.
        mask_BT: bool, the response mask less what was left out (mode `mask`). Divide by counts
            of the response mask to let what is left out shrink the step, by counts of this one
            not to.
        metrics: plain numbers over the batch given.
    """

    weights_BT: Tensor
    mask_BT: Tensor
    metrics: dict[str, float]


def _gap(
    old_log_prob_BT: Tensor, rollout_log_prob_BT: Tensor, response_mask_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """(bool mask, log π_train − log π_rollout as float64, 0 outside it)."""
    require_matrix("response_mask", response_mask_BT)
    tensors = {"old_log_prob": old_log_prob_BT, "rollout_log_prob": rollout_log_prob_BT}
    require_same_shape("response_mask", response_mask_BT, **tensors)
    mask = to_bool_mask(response_mask_BT)
    require_finite(mask, **tensors)
    gap = old_log_prob_BT.detach().double() - rollout_log_prob_BT.detach().double()
    return mask, gap.masked_fill_(~mask, 0)


def importance_correction(
    old_log_prob_BT: Tensor,
    rollout_log_prob_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    level: str = "token",
    mode: str = "truncate",
    upper: float = 2.0,
    lower: float | None = None,
    normalise: bool = False,
) -> ImportanceCorrection:
    """Bounded weights π_train/π_rollout.

    Args:
        old_log_prob_BT: log π of the training engine at the start of the step.
        rollout_log_prob_BT: log π as sampled.
        level: a key of `LEVELS`. mode: a key of `MODES`.
        upper, lower: bounds of w. `lower` None: 1/upper in mode `mask`, none in `truncate`.
        normalise: divide by the mean weight of the batch, so that the step keeps its size.

    Raises:
        UnknownNameError: level or mode. AlgorithmError: bounds in disorder.
        ShapeError, MaskError, NonFiniteError.
    """
    look_up(LEVELS, level, "importance level")
    look_up(MODES, mode, "importance mode")
    if lower is None:
        lower = 1 / upper if mode == "mask" and upper > 0 else 0.0
    if not 0 <= lower < upper:
        raise AlgorithmError(f"`lower` must be at least 0 and below `upper`: {lower}, {upper}.")
    mask, gap = _gap(old_log_prob_BT, rollout_log_prob_BT, response_mask_BT)
    raw = _level(gap, mask, level).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    outside = ((raw < lower) | (raw > upper)) & mask
    kept = mask & ~outside if mode == "mask" else mask
    weights = (raw if mode == "mask" else raw.clamp(lower, upper)).masked_fill(~kept, 0)
    size = mask.sum().clamp(min=1)
    mean = weights.sum() / size
    if normalise and float(mean) > 0:
        weights = weights / mean
    metrics = {
        "is_weight_mean": float(weights.sum() / size),
        "is_weight_max": float(weights.max()),
        "is_outside_fraction": float(outside.sum() / size),
        "is_sample_fraction_left_out": float(
            (mask.any(-1) & ~kept.any(-1)).sum() / mask.any(-1).sum().clamp(min=1)
        ),
        "is_effective_sample_size": _effective_share(weights, mask),
    }
    return ImportanceCorrection(weights.to(as_float(old_log_prob_BT).dtype), kept, metrics)


def _level(gap_BT: Tensor, mask_BT: Tensor, level: str) -> Tensor:
    if level == "token":
        return gap_BT
    total = gap_BT.sum(-1, keepdim=True)
    if level == "geometric":
        total = total / mask_BT.sum(-1, keepdim=True).clamp(min=1)
    return total.expand_as(gap_BT)


def _effective_share(weights_BT: Tensor, mask_BT: Tensor) -> float:
    """(Σw)² / (n·Σw²): 1 if all weights are equal, 1/n if one holds everything."""
    square_sum = weights_BT.square().sum() * mask_BT.sum()
    return float(weights_BT.sum().square() / square_sum) if float(square_sum) > 0 else 0.0


def mismatch_metrics(
    old_log_prob_BT: Tensor, rollout_log_prob_BT: Tensor, response_mask_BT: Tensor
) -> dict[str, float]:
    """How far training and sampling engine are apart, over the batch given.

    Keys: `mismatch_k1` and `mismatch_k3` estimate KL(π_rollout‖π_train) a token, in nats;
    `mismatch_abs` mean and `mismatch_max` largest |Δ log π|; `mismatch_prob_max` the largest
    |Δπ|; `ppl_gap` perplexity under training minus under rollout, mean over responses;
    `ppl_ratio` exp of the mean log-perplexity difference; `effective_sample_size` of the
    untruncated token weights, as a share of the tokens; `mismatch_sequence_ess` of the
    responses' likelihood ratios, as a share of the responses. Exponents are held below 20, so
    that a broken engine shows as a large number and not as infinity.

    Raises:
        ShapeError, MaskError, NonFiniteError.
    """
    mask, gap = _gap(old_log_prob_BT, rollout_log_prob_BT, response_mask_BT)
    tokens = mask.sum().clamp(min=1)
    lengths = mask.sum(-1)
    present = lengths > 0
    samples = present.sum().clamp(min=1)
    bounded = gap.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    rollout = rollout_log_prob_BT.detach().double().masked_fill(~mask, 0)
    log_ppl_rollout = -rollout.sum(-1) / lengths.clamp(min=1)
    log_ppl_train = log_ppl_rollout - gap.sum(-1) / lengths.clamp(min=1)
    difference = (log_ppl_train - log_ppl_rollout).masked_fill(~present, 0)
    ppl_train, ppl_rollout = (
        x.clamp(max=LOG_RATIO_LIMIT).exp() for x in (log_ppl_train, log_ppl_rollout)
    )
    ppl = (ppl_train - ppl_rollout).masked_fill(~present, 0)
    probability = ((rollout + gap).exp() - rollout.exp()).masked_fill(~mask, 0)
    ratios = gap.sum(-1).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().masked_fill(~present, 0)
    return {
        "mismatch_k1": float(-gap.sum() / tokens),
        "mismatch_k3": float((torch.expm1(bounded) - bounded).sum() / tokens),
        "mismatch_abs": float(gap.abs().sum() / tokens),
        "mismatch_max": float(gap.abs().max()),
        "mismatch_prob_max": float(probability.abs().max()),
        "ppl_gap": float(ppl.sum() / samples),
        "ppl_ratio": float((difference.sum() / samples).clamp(max=LOG_RATIO_LIMIT).exp()),
        "effective_sample_size": _effective_share(bounded.exp().masked_fill(~mask, 0), mask),
        "mismatch_sequence_ess": _effective_share(ratios, present),
    }
