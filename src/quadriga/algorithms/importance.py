"""Importance weights and metrics for the mismatch of rollout engine and training engine.

Both engines hold the same weights, yet their log-probabilities differ (kernels, precision, a
weight sync that failed). The weight w = π_train/π_rollout corrects for the difference. Here w is
bounded, for each token or for the whole response, by truncation (truncated importance sampling,
Ionides 2008; V-trace, arXiv 1802.01561) or by weight 0 outside an interval.

Shapes: B samples, T tokens.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quadriga.algorithms.aggregation import Partial, merge_partials
from quadriga.algorithms.clipped_losses import LOG_RATIO_LIMIT
from quadriga.algorithms.registry import look_up
from quadriga.algorithms.tensors import as_float, checked_mask
from quadriga.errors import AlgorithmError

ImportanceLevel = Literal["token", "sequence", "geometric"]
ImportanceMode = Literal["truncate", "mask"]

LEVELS: dict[ImportanceLevel, str] = {
    "token": "w_t = π_t/π_rollout,t",
    "sequence": "w = Π_t π_t/π_rollout,t, the same at each token",
    "geometric": "w = (Π_t π_t/π_rollout,t)^(1/|y|), the same at each token",
}
MODES: dict[ImportanceMode, str] = {
    "truncate": "min(w, upper); max(w, lower) if `lower` is given",
    "mask": "tokens or responses with w outside [lower, upper] get weight 0",
}

# One response of two tokens whose π_train/π_rollout is 2 and 4, with upper = 3:
#
#     level        w of the tokens        truncate     mask (lower = 1/3)
#     token        2      4               2    3       2   0
#     sequence     8      8               3    3       0   0
#     geometric    √8     √8  (2.83)      √8   √8      √8  √8


@dataclass(frozen=True)
class ImportanceCorrection:
    """Weights for the policy loss.

    Attributes:
        weights_BT: float, at least 0, and 0 outside `mask_BT`; detached.
        mask_BT: bool; the response mask without the tokens that mode `mask` excludes. Dividing
            the loss by counts of the response mask makes the step smaller when tokens are
            excluded; dividing by counts of this mask does not.
        statistics: of the given rows, for `correction_metrics`.
    """

    weights_BT: Tensor
    mask_BT: Tensor
    statistics: dict[str, Partial]

    @property
    def metrics(self) -> dict[str, float]:
        """Plain floats over the given rows; {} if no token is in the mask."""
        return correction_metrics(merge_partials([self.statistics]))


def _log_weights(
    old_log_prob_BT: Tensor, rollout_log_prob_BT: Tensor, response_mask_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (bool mask, log π_train − log π_rollout in float64, 0 outside the mask)."""
    mask = checked_mask(
        response_mask_BT, old_log_prob=old_log_prob_BT, rollout_log_prob=rollout_log_prob_BT
    )
    log_weights = old_log_prob_BT.detach().double() - rollout_log_prob_BT.detach().double()
    return mask, log_weights.masked_fill_(~mask, 0)


def importance_correction(
    old_log_prob_BT: Tensor,
    rollout_log_prob_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    level: ImportanceLevel = "token",
    mode: ImportanceMode = "truncate",
    upper: float = 2.0,
    lower: float | None = None,
    normalise: bool = False,
) -> ImportanceCorrection:
    """Compute bounded importance weights π_train/π_rollout.

    Args:
        old_log_prob_BT: log π of the training engine at the start of the step.
        rollout_log_prob_BT: log π of the rollout engine, recorded while sampling.
        response_mask_BT: 0/1.
        level: a key of `LEVELS`.
        mode: a key of `MODES`.
        upper: upper bound of w.
        lower: lower bound of w. None: 1/upper in mode `mask`, no bound in mode `truncate`.
        normalise: divide the weights by their mean over the batch, so that the size of the step
            does not change.

    Raises:
        UnknownNameError: `level` or `mode` is unknown.
        AlgorithmError: the bounds are not 0 ≤ lower < upper.
        ShapeError, MaskError, NonFiniteError.
    """
    look_up(LEVELS, level, "importance level")
    look_up(MODES, mode, "importance mode")
    if lower is None:
        lower = 1 / upper if mode == "mask" and upper > 0 else 0.0
    if not 0 <= lower < upper:
        raise AlgorithmError(
            f"`lower` must be at least 0 and below `upper`, but received lower {lower} and "
            f"upper {upper}."
        )
    mask, log_weights = _log_weights(old_log_prob_BT, rollout_log_prob_BT, response_mask_BT)
    raw = _at_level(log_weights, mask, level).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    outside = ((raw < lower) | (raw > upper)) & mask
    kept = mask & ~outside if mode == "mask" else mask
    weights = (raw if mode == "mask" else raw.clamp(lower, upper)).masked_fill(~kept, 0)
    mean = weights.sum() / mask.sum().clamp(min=1)
    if normalise and float(mean) > 0:
        weights = weights / mean
    statistics = {
        "is_weight_mean": Partial.mean(weights, mask),
        "is_weight_mean_square": Partial.mean(weights.square(), mask),
        "is_weight_max": Partial.max(weights, mask),
        "is_outside_fraction": Partial.mean(outside.double(), mask),
        "is_sample_fraction_left_out": Partial.mean((~kept.any(-1)).double(), mask.any(-1)),
    }
    return ImportanceCorrection(weights.to(as_float(old_log_prob_BT).dtype), kept, statistics)


def _at_level(log_weights_BT: Tensor, mask_BT: Tensor, level: ImportanceLevel) -> Tensor:
    """Return the logarithm of w at each token: its own, or one number for the whole response."""
    if level == "token":
        return log_weights_BT
    total = log_weights_BT.sum(-1, keepdim=True)
    if level == "geometric":
        total = total / mask_BT.sum(-1, keepdim=True).clamp(min=1)
    return total.expand_as(log_weights_BT)


def mismatch_metrics(
    old_log_prob_BT: Tensor,
    rollout_log_prob_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    bound: float = 0.5,
) -> dict[str, float]:
    """Measure the difference between training engine and rollout engine over the given rows.

    Log-ratios and log-perplexities are clamped to 20 before `exp`, so that a broken engine shows
    as a large number instead of infinity.

    Args:
        bound: nats, of `mismatch_beyond`.

    Returns:
        {} if no token is in the mask. Otherwise
        `mismatch_k1`, `mismatch_k3`: estimates of KL(π_rollout‖π_train) per token, in nats.
        `mismatch_abs`, `mismatch_max`: mean and maximum of |Δ log π|.
        `mismatch_beyond`: share of tokens with |Δ log π| > `bound`.
        `mismatch_correlation`: Pearson correlation of log π_train and log π_rollout over tokens.
            Absent if one of them does not vary, as with a single token.
        `mismatch_prob_max`: maximum of |Δπ|.
        `ppl_gap`: perplexity under training minus under rollout, mean over responses.
        `ppl_ratio`: exp of the mean difference of log-perplexities.
        `effective_sample_size`: of the token weights without truncation, as a fraction of tokens.
        `mismatch_sequence_ess`: of the responses' likelihood ratios, as a fraction of responses.

    Raises:
        ShapeError, MaskError, NonFiniteError.
    """
    part = mismatch_statistics(old_log_prob_BT, rollout_log_prob_BT, response_mask_BT, bound=bound)
    return mismatch_of_statistics(merge_partials([part]))


def mismatch_statistics(
    old_log_prob_BT: Tensor,
    rollout_log_prob_BT: Tensor,
    response_mask_BT: Tensor,
    *,
    bound: float = 0.5,
) -> dict[str, Partial]:
    """Return what `mismatch_of_statistics` needs, for the rows of a micro-batch.

    Raises:
        ShapeError, MaskError, NonFiniteError.
    """
    mask, log_weights = _log_weights(old_log_prob_BT, rollout_log_prob_BT, response_mask_BT)
    lengths = mask.sum(-1)
    present = lengths > 0
    bounded = log_weights.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    rollout = rollout_log_prob_BT.detach().double().masked_fill(~mask, 0)
    train = rollout + log_weights
    log_ppl_rollout = -rollout.sum(-1) / lengths.clamp(min=1)
    log_ppl_train = log_ppl_rollout - log_weights.sum(-1) / lengths.clamp(min=1)
    ppl_train, ppl_rollout = (
        x.clamp(max=LOG_RATIO_LIMIT).exp() for x in (log_ppl_train, log_ppl_rollout)
    )
    probability = train.exp() - rollout.exp()
    ratios = log_weights.sum(-1).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    weights = bounded.exp()
    # The tokens were sampled from π_rollout, so estimates of KL(π_rollout‖π_train) use
    # log π_rollout − log π_train = −log w: k1 = −log w and k3 = w − 1 − log w.
    return {
        "mismatch_k1": Partial.mean(-log_weights, mask),
        "mismatch_k3": Partial.mean(torch.expm1(bounded) - bounded, mask),
        "mismatch_abs": Partial.mean(log_weights.abs(), mask),
        "mismatch_max": Partial.max(log_weights.abs(), mask),
        "mismatch_prob_max": Partial.max(probability.abs(), mask),
        "mismatch_beyond": Partial.mean((log_weights.abs() > bound).double(), mask),
        "train": Partial.mean(train, mask),
        "train_square": Partial.mean(train.square(), mask),
        "rollout": Partial.mean(rollout, mask),
        "rollout_square": Partial.mean(rollout.square(), mask),
        "product": Partial.mean(train * rollout, mask),
        "ppl_gap": Partial.mean(ppl_train - ppl_rollout, present),
        "log_ppl_gap": Partial.mean(log_ppl_train - log_ppl_rollout, present),
        "weight": Partial.mean(weights, mask),
        "weight_square": Partial.mean(weights.square(), mask),
        "ratio": Partial.mean(ratios, present),
        "ratio_square": Partial.mean(ratios.square(), present),
    }


def mismatch_of_statistics(merged: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of `mismatch_metrics` from statistics that were merged over rows.

    Without a single token in the mask `merged` is empty: nothing was compared, so there are no
    metrics.
    """
    if not merged:
        return {}
    kept = ("mismatch_k1", "mismatch_k3", "mismatch_abs", "mismatch_max", "mismatch_prob_max",
            "mismatch_beyond", "ppl_gap")  # fmt: skip
    correlation = _correlation(merged)
    return {
        **{name: merged[name] for name in kept},
        **({} if correlation is None else {"mismatch_correlation": correlation}),
        "ppl_ratio": math.exp(min(merged["log_ppl_gap"], LOG_RATIO_LIMIT)),
        "effective_sample_size": _effective_share(merged, "weight"),
        "mismatch_sequence_ess": _effective_share(merged, "ratio"),
        **correction_metrics(merged),
    }


def correction_metrics(merged: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a correction from statistics that were merged over rows; {} without.

    `is_effective_sample_size` is (Σw)² / (n·Σw²): 1 if all n weights are equal, and 1/n if one of
    them holds the whole sum. Weights 2, 0.5, 4 give 6.5² / (3 · 20.25) = 0.70.
    """
    square = "is_weight_mean_square"
    found = {key: value for key, value in merged.items() if key.startswith("is_") and key != square}
    if found:
        found["is_effective_sample_size"] = _effective_share(merged, "is_weight_mean")
    return found


def _effective_share(merged: Mapping[str, float], name: str) -> float:
    """Return (Σw)² / (n·Σw²) from the means of w and of w²: (Σw / n)² / (Σw² / n)."""
    square = merged[f"{name}_square"]
    return merged[name] ** 2 / square if square > 0 else 0.0


def _correlation(merged: Mapping[str, float]) -> float | None:
    """Return Pearson's r from means: (E[xy] − E[x]E[y]) / √((E[x²] − E[x]²)(E[y²] − E[y]²)).

    None if x or y does not vary. A variance below the rounding error of E[x²] in float64 counts as
    0, because the difference of two equal means is rounding only.
    """
    variances = []
    for name in ("train", "rollout"):
        square = merged[f"{name}_square"]
        variance = square - merged[name] ** 2
        if variance <= 1e-12 * square:
            return None
        variances.append(variance)
    covariance = merged["product"] - merged["train"] * merged["rollout"]
    return max(-1.0, min(1.0, covariance / math.sqrt(variances[0] * variances[1])))
