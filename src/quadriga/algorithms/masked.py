"""Statistics over the tokens that a mask selects. Shapes: any; the mask has the values' shape.

Values outside the mask are replaced, not multiplied by 0, so NaN there has no effect.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quadriga.algorithms.checks import as_float, to_bool_mask

WHITEN_EPSILON = 1e-8
# Numpy asks the kernel for huge pages from this size on, torch does not. With pages of 4 kB, the
# page faults of a new tensor take longer than the arithmetic on it.
_HUGE_BYTES = 4 * 2**20
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


def new_empty(shape: torch.Size, like: Tensor) -> Tensor:
    """Return an uninitialised tensor with the dtype and device of `like`.

    Large tensors on the CPU are allocated by numpy (see `_HUGE_BYTES`).
    """
    on_cpu = like.device.type == "cpu" and like.dtype in _NUMPY
    if not on_cpu or shape.numel() * like.element_size() < _HUGE_BYTES:
        return like.new_empty(shape)
    return torch.from_numpy(np.empty(shape, dtype=_NUMPY[like.dtype]))


def masked_copy(values: Tensor, selected: Tensor) -> Tensor:
    """Return a detached copy of `values` with 0 outside the bool mask.

    Args:
        values: the shape of the mask, or one that broadcasts to it ([B, 1]).
        selected: bool.
    """
    data = values.detach()
    shape = data.expand(selected.shape).shape
    return torch.where(selected, data, data.new_zeros(()), out=new_empty(shape, data))


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return Σ values·mask over `dim` (None: over all positions), in the dtype of `values`."""
    kept = values.masked_fill(~to_bool_mask(mask), 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return Σ values·mask / Σ mask over `dim`; 0 where the mask selects nothing."""
    selected = to_bool_mask(mask)
    count = selected.sum() if dim is None else selected.sum(dim)
    return masked_sum(values, selected, dim) / count.clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance of the selected values, 0-d; 0 if fewer than two are selected.

    Args:
        unbiased: divide by n − 1 instead of n.
    """
    return _centre(as_float(values), to_bool_mask(mask), unbiased)[2]


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Return (values − mean) / √(var + 1e-8) over the selected values, 0 elsewhere.

    If all selected values are equal, the result is exactly 0 (with `shift_mean=False`: exactly
    the values).

    Args:
        values: any dtype; the result is float32 or float64.
        mask: 0/1.
        shift_mean: False adds the mean again after scaling.
    """
    return whiten_selected(as_float(values), to_bool_mask(mask), shift_mean)


def whiten_selected(
    values: Tensor, selected: Tensor, shift_mean: bool = True, out: Tensor | None = None
) -> Tensor:
    """Compute `masked_whiten` for float values and a bool mask.

    Args:
        out: the tensor to write to; it may be `values`. None allocates one.
    """
    mean, centred, var = _centre(values, selected, unbiased=True, out=out)
    whitened = centred.mul_(torch.rsqrt(var + WHITEN_EPSILON))
    return whitened if shift_mean else whitened.add_(selected * mean)


# Mean and variance are computed from the differences to one of the selected values. Example in
# float32, where the sum of these values, 30000003, is not representable:
#
#     values     10000000   10000001   10000002
#     some       10000000                          the first selected value
#     offset     0          1          2
#     gap        1                                 the mean of the offsets; the mean is some + gap
#     centred    −1         0          1
#
# A large common part therefore costs no precision. If all values are equal, `offset`, `centred`
# and the variance are exactly 0.
def _centre(
    values: Tensor, selected: Tensor, unbiased: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (mean, values − mean with 0 outside the mask, variance); the first and last 0-d."""
    count = int(torch.count_nonzero(selected))
    if count == 0:
        zero = values.new_zeros(())
        return zero, torch.zeros_like(values) if out is None else out.zero_(), zero
    # Find one selected position: the first row that has one, then the first column in that row.
    # `amax` and `argmax` run on bytes, because on bool tensors they are many times slower.
    width = max(selected.shape[-1], 1) if selected.dim() else 1
    flags = selected.view(torch.uint8).reshape(-1, width)
    row = int(flags.amax(-1).argmax())
    some = values.reshape(flags.shape)[row, int(flags[row].argmax())].clone()
    if out is None and not values.requires_grad:
        out = new_empty(values.shape, values)
    # `some` and `gap` stand outside the mask, where the subtraction then gives exactly 0.
    offset = torch.where(selected, values, some, out=out).sub_(some)
    gap = offset.sum() / count
    centred = torch.where(selected, offset, gap, out=offset).sub_(gap)
    degrees = max(count - 1, 1) if unbiased else count
    return some + gap, centred, torch.linalg.vector_norm(centred).square() / degrees
