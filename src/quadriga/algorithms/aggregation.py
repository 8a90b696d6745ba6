"""From a loss per token to one number. Shapes: B samples, T tokens.

Every mode divides by counts of the whole mini-batch, given as arguments. The results of all
micro-batches on all ranks therefore add up to the loss of the unsplit batch, and so do the
gradients. (An engine that averages gradients over R ranks multiplies by R.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from quadriga.algorithms.checks import as_float, require_matrix, require_same_shape, to_bool_mask
from quadriga.algorithms.registry import look_up
from quadriga.errors import AlgorithmError

Count = int | float | Tensor


@dataclass(frozen=True)
class AggregationEntry:
    """One mode. `fn(loss_BT, mask_BT, tokens, sequences, length)` gets a loss that is 0 outside
    the mask, the global counts (at least 1) and `loss_scale_length`."""

    fn: Callable[[Tensor, Tensor, Count, Count, float], Tensor]
    formula: str
    settings: tuple[str, ...] = ()
    paper: str = ""


def _token_mean(loss: Tensor, mask: Tensor, tokens: Count, sequences: Count, c: float) -> Tensor:
    return loss.sum() / tokens


def _token_sum(loss: Tensor, mask: Tensor, tokens: Count, sequences: Count, c: float) -> Tensor:
    return loss.sum()


def _seq_sum(loss: Tensor, mask: Tensor, tokens: Count, sequences: Count, c: float) -> Tensor:
    return loss.sum() / sequences


def _seq_mean(loss: Tensor, mask: Tensor, tokens: Count, sequences: Count, c: float) -> Tensor:
    return (loss.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / sequences


def _seq_sum_norm(loss: Tensor, mask: Tensor, tokens: Count, sequences: Count, c: float) -> Tensor:
    return loss.sum() / sequences / c


# N tokens and S sequences of the mini-batch, n_i tokens of sequence i, C = loss_scale_length.
AGGREGATIONS: dict[str, AggregationEntry] = {
    "token-mean": AggregationEntry(_token_mean, "Σ_i Σ_t ℓ_it / N", paper="2503.14476"),
    "token-sum": AggregationEntry(_token_sum, "Σ_i Σ_t ℓ_it"),
    "seq-mean-token-sum": AggregationEntry(_seq_sum, "Σ_i Σ_t ℓ_it / S"),
    "seq-mean-token-mean": AggregationEntry(
        _seq_mean, "Σ_i (Σ_t ℓ_it / n_i) / S", paper="2402.03300"
    ),
    "seq-mean-token-sum-norm": AggregationEntry(
        _seq_sum_norm, "Σ_i Σ_t ℓ_it / (S·C)", ("loss_scale_length",), paper="2503.20783"
    ),
}


def count_mask(mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, sequences with at least one token) of this part, 0-d int64.

    Their sums over all micro-batches and ranks of a mini-batch are what `aggregate` wants.
    """
    mask = to_bool_mask(mask_BT)
    return mask.sum(), mask.any(-1).sum()


def aggregate(
    loss_BT: Tensor,
    mask_BT: Tensor,
    mode: str,
    *,
    global_tokens: Count,
    global_sequences: Count,
    loss_scale_length: float | None = None,
) -> Tensor:
    """This part's share of the mini-batch's loss (0-d, at least float32).

    Args:
        loss_BT: loss of each token; what lies outside the mask does not matter.
        mask_BT: 0/1, which tokens count.
        mode: a key of `AGGREGATIONS`.
        global_tokens, global_sequences: `count_mask` summed over the whole mini-batch. A
            sequence without tokens counts nowhere.
        loss_scale_length: C of `seq-mean-token-sum-norm`, a constant of the run such as the
            longest response allowed; never this batch's width, which depends on the split.

    Raises:
        UnknownNameError: the mode. ShapeError, MaskError. AlgorithmError: C is missing.
    """
    entry = look_up(AGGREGATIONS, mode, "aggregation")
    require_matrix("loss_mask", mask_BT)
    require_same_shape("loss_mask", mask_BT, loss=loss_BT)
    if "loss_scale_length" in entry.settings and not (loss_scale_length and loss_scale_length > 0):
        raise AlgorithmError(
            f"`{mode}` divides by `loss_scale_length`, which must be a positive constant of the "
            f"run (the longest response allowed), but is {loss_scale_length}.",
            tensor="loss_scale_length",
        )
    mask = to_bool_mask(mask_BT, "loss_mask")
    kept = as_float(loss_BT).masked_fill(~mask, 0)
    tokens, sequences = _at_least_one(global_tokens), _at_least_one(global_sequences)
    return entry.fn(kept, mask, tokens, sequences, loss_scale_length or 1.0)


def _at_least_one(count: Count) -> Count:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
