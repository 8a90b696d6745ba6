"""Statistics over the tokens that a mask selects. Shapes: any, the mask has the values' shape.

What lies outside the mask never matters, not even NaN: it is replaced, not multiplied by zero.
Sums run in float64, so that the mean of a constant is that constant.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quadriga.algorithms.checks import as_float, to_bool_mask

WHITEN_EPSILON = 1e-8


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Σ values·mask over `dim` (None: everything), in the dtype of `values`."""
    kept = values.masked_fill(~to_bool_mask(mask), 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Σ values·mask / Σ mask; 0 where nothing is selected."""
    selected = to_bool_mask(mask)
    count = selected.sum() if dim is None else selected.sum(dim)
    return masked_sum(values, selected, dim) / count.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of the selected values (0-d, float64); 0 where fewer than two are selected."""
    selected = to_bool_mask(mask)
    kept = as_float(values).masked_fill(~selected, 0)
    return _centre_and_var(kept, selected, unbiased)[2]


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(values − mean) / √(var + 1e-8) over the selected, 0 elsewhere; at least float32.

    `shift_mean=False` puts the mean back after scaling (used for rewards). Values that are all
    equal become exactly 0 (or stay, with `shift_mean=False`).
    """
    selected = to_bool_mask(mask)
    return whiten_selected(as_float(values).masked_fill(~selected, 0), selected, shift_mean)


def whiten_selected(kept: Tensor, selected: Tensor, shift_mean: bool = True) -> Tensor:
    """`masked_whiten` for float values that are already 0 outside `selected` (bool)."""
    mean, centred, var = _centre_and_var(kept, selected, unbiased=True)
    whitened = centred.mul_(torch.rsqrt(var + WHITEN_EPSILON))
    return whitened if shift_mean else whitened.add_(selected * mean.to(kept.dtype))


def _centre_and_var(
    kept: Tensor, selected: Tensor, unbiased: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (0-d float64), values − mean under the mask (0 elsewhere), variance (0-d float64)."""
    count = selected.sum()
    size = count.clamp(min=1).double()
    mean = kept.sum(dtype=torch.float64) / size
    centred = (kept - mean.to(kept.dtype)).mul_(selected)
    squares = torch.linalg.vector_norm(centred, dtype=torch.float64).square()
    degrees = (count - 1).clamp(min=1).double() if unbiased else size
    return mean, centred, squares / degrees
