"""Metrics that can be merged over micro-batches and ranks, and the loss of a mini-batch from the
loss of each token. Shapes: B samples, T tokens.

A mean of means is wrong if the parts differ in size. A total with its weight can be added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quadriga.algorithms.registry import look_up
from quadriga.algorithms.tensors import as_float, checked_mask, to_bool_mask
from quadriga.errors import AlgorithmError

Reduction = Literal["mean", "sum", "max", "min"]


# Mean of a metric over two micro-batches, the first with three tokens, the second with one:
#
#     values       Partial.mean
#     1  2  3      total  6, weight 3
#     10           total 10, weight 1
#     merged       16 / 4 = 4           the mean of the means would be (2 + 10) / 2 = 6
@dataclass(frozen=True)
class Partial:
    """A metric over some rows of a batch. Both tensors are 0-d and detached.

    The tensors stay on their device until `merge_partials` is called, so that a micro-batch does
    not wait for it.

    Attributes:
        total: the sum of the values (mean, sum), or their extreme (max, min).
        weight: the number of values (mean), or 1 if there was any value, else 0.
        reduction: how partials of the metric are merged.
    """

    total: Tensor
    weight: Tensor
    reduction: Reduction

    @classmethod
    def mean(cls, values: Tensor, mask: Tensor) -> Partial:
        """Create the mean of `values` under the bool `mask`."""
        return cls(values.detach().masked_fill(~mask, 0).sum(), mask.sum(), "mean")

    @classmethod
    def sum(cls, values: Tensor, mask: Tensor) -> Partial:
        """Create the sum of `values` under the bool `mask`."""
        return cls(values.detach().masked_fill(~mask, 0).sum(), mask.any().long(), "sum")

    @classmethod
    def max(cls, values: Tensor, mask: Tensor) -> Partial:
        """Create the maximum of `values` under the bool `mask`."""
        kept = values.detach().masked_fill(~mask, -torch.inf)
        total = kept.max() if kept.numel() else kept.new_tensor(-torch.inf)
        return cls(total, mask.any().long(), "max")

    @classmethod
    def min(cls, values: Tensor, mask: Tensor) -> Partial:
        """Create the minimum of `values` under the bool `mask`."""
        kept = values.detach().masked_fill(~mask, torch.inf)
        total = kept.min() if kept.numel() else kept.new_tensor(torch.inf)
        return cls(total, mask.any().long(), "min")


def merge_partials(parts: Iterable[Mapping[str, Partial]]) -> dict[str, float]:
    """Merge the partials of all micro-batches and ranks into one float per metric.

    The order of `parts` does not matter. A metric without a single value (weight 0 everywhere) is
    absent from the result.
    """
    gathered: dict[str, list[tuple[float, float, Reduction]]] = {}
    for part in parts:
        for name, partial in part.items():
            numbers = (float(partial.total), float(partial.weight), partial.reduction)
            gathered.setdefault(name, []).append(numbers)
    merged: dict[str, float] = {}
    reduce: dict[str, Callable[[list[float]], float]] = {"sum": sum, "max": max, "min": min}
    for name, shares in gathered.items():
        present = [share for share in shares if share[1] > 0]
        if not present:
            continue
        totals, reduction = [share[0] for share in present], present[0][2]
        if reduction == "mean":
            merged[name] = sum(totals) / sum(share[1] for share in present)
        else:
            merged[name] = reduce[reduction](totals)
    return merged


# Aggregation: from the loss of each token to one number. Shapes: B samples, T tokens.
#
# Every mode divides by counts of the whole mini-batch, which are arguments. The results of all
# micro-batches on all ranks therefore add up to the loss of the unsplit mini-batch, and so do the
# gradients. An engine that averages gradients over R ranks must multiply the result by R.

Count = int | float | Tensor


@dataclass(frozen=True)
class AggregationEntry:
    """One aggregation mode.

    Attributes:
        fn: `fn(loss_BT, mask_BT, tokens, sequences, length)` returns the loss. `loss_BT` is 0
            outside the mask, the counts are global and at least 1, and `length` is
            `loss_scale_length`.
        formula: the formula in the notation of `docs/notation.md`.
        settings: the settings that the mode reads.
        paper: the arXiv id, or "".
    """

    fn: Callable[[Tensor, Tensor, Count, Count, float], Tensor]
    formula: str
    settings: tuple[str, ...] = ()
    paper: str = ""


# Why global counts. A mini-batch has two sequences, split into two micro-batches of one sequence:
#
#     micro-batch   token losses   tokens   with global counts (N = 4)   with its own count
#     1             1  2  3        3        6 / 4 = 1.5                  6 / 3 = 2
#     2             4              1        4 / 4 = 1.0                  4 / 1 = 4
#     result                                sum  = 2.5                   mean = 3
#
# The unsplit `token-mean` is 10 / 4 = 2.5. Own counts give 3, because the single token of the
# second micro-batch then weighs as much as the three tokens of the first one together.
#
# A sequence is never split over micro-batches, so `seq-mean-token-mean` knows its length; only the
# number of sequences must be global. Sequences (1, 2, 3) and (4): 2/2 + 4/2 = 3.
#
# Symbols in the formulas: N tokens and S sequences of the mini-batch, n_i tokens of sequence i,
# C = loss_scale_length.
AGGREGATIONS: dict[str, AggregationEntry] = {
    "token-mean": AggregationEntry(
        lambda loss, mask, n, s, c: loss.sum() / n, "Σ_i Σ_t ℓ_it / N", paper="2503.14476"
    ),
    "token-sum": AggregationEntry(lambda loss, mask, n, s, c: loss.sum(), "Σ_i Σ_t ℓ_it"),
    "seq-mean-token-sum": AggregationEntry(
        lambda loss, mask, n, s, c: loss.sum() / s, "Σ_i Σ_t ℓ_it / S"
    ),
    "seq-mean-token-mean": AggregationEntry(
        lambda loss, mask, n, s, c: (loss.sum(-1) / mask.sum(-1).clamp(min=1)).sum() / s,
        "Σ_i (Σ_t ℓ_it / n_i) / S", paper="2402.03300",
    ),
    "seq-mean-token-sum-norm": AggregationEntry(
        lambda loss, mask, n, s, c: loss.sum() / s / c,
        "Σ_i Σ_t ℓ_it / (S·C)", ("loss_scale_length",), paper="2503.20783",
    ),
}  # fmt: skip


def count_mask(mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return (tokens, sequences with at least one token) under the mask, both 0-d int64.

    Sum both over all micro-batches and ranks of a mini-batch to get the counts for `aggregate`.
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
    """Return the contribution of the given rows to the loss of the mini-batch.

    Args:
        loss_BT: loss of each token; values outside the mask are ignored.
        mask_BT: 0/1; 1 on the tokens that count.
        mode: a key of `AGGREGATIONS`.
        global_tokens: tokens of the whole mini-batch: `count_mask` summed over micro-batches and
            ranks.
        global_sequences: sequences with at least one token, summed in the same way.
        loss_scale_length: C of `seq-mean-token-sum-norm`, a constant of the run such as the
            maximum response length. Do not pass the width of the batch, which depends on how
            rows are split.

    Returns:
        0-d tensor, float32 or float64.

    Raises:
        UnknownNameError: no mode has this name.
        ShapeError, MaskError.
        AlgorithmError: the mode reads `loss_scale_length`, which is missing or not positive.
    """
    entry = look_up(AGGREGATIONS, mode, "aggregation")
    mask = checked_mask(mask_BT, False, "loss_mask", loss=loss_BT)
    if "loss_scale_length" in entry.settings and not (loss_scale_length and loss_scale_length > 0):
        raise AlgorithmError(
            f"`{mode}` divides by `loss_scale_length`, which must be a positive constant of the "
            f"run (the maximum response length), but received {loss_scale_length}.",
            tensor="loss_scale_length",
        )
    kept = as_float(loss_BT).masked_fill(~mask, 0)
    tokens, sequences = _at_least_one(global_tokens), _at_least_one(global_sequences)
    return entry.fn(kept, mask, tokens, sequences, loss_scale_length or 1.0)


def _at_least_one(count: Count) -> Count:
    """Return the count, or 1 if it is 0: a mini-batch without tokens then has loss 0, not NaN."""
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
