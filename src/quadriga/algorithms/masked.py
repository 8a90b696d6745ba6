"""Statistics over the tokens that a mask selects. Shapes: any, the mask has the values' shape.

What lies outside the mask never matters, not even NaN: it is replaced, not multiplied by zero.
Mean and variance are taken of the differences to one of the values, so that equal values have
exactly that mean and exactly no variance, and large offsets cost no precision.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quadriga.algorithms.checks import as_float, to_bool_mask

WHITEN_EPSILON = 1e-8
# From here on numpy asks the kernel for huge pages: faults of small ones, one for every 4 kB of
# fresh memory, take longer than the arithmetic.
_HUGE_BYTES = 4 * 2**20
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


def room(shape: torch.Size, like: Tensor) -> Tensor:
    """An uninitialised tensor of that shape, of the dtype and on the device of `like`."""
    on_cpu = like.device.type == "cpu" and like.dtype in _NUMPY
    if not on_cpu or shape.numel() * like.element_size() < _HUGE_BYTES:
        return like.new_empty(shape)
    return torch.from_numpy(np.empty(shape, dtype=_NUMPY[like.dtype]))


def keep(values: Tensor, selected: Tensor) -> Tensor:
    """A copy of `values` with 0 outside the bool mask, whatever stood there; no gradient.

    `values` may have one column for all of the mask's.
    """
    data = values.detach()
    shape = data.expand(selected.shape).shape
    return torch.where(selected, data, data.new_zeros(()), out=room(shape, data))


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
    """Variance of the selected values (0-d); 0 where fewer than two are selected."""
    return _centre(as_float(values), to_bool_mask(mask), unbiased)[2]


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(values − mean) / √(var + 1e-8) over the selected, 0 elsewhere; at least float32.

    `shift_mean=False` puts the mean back after scaling (used for rewards). Values that are all
    equal become exactly 0 (or stay, with `shift_mean=False`).
    """
    return whiten_selected(as_float(values), to_bool_mask(mask), shift_mean)


def whiten_selected(
    values: Tensor, selected: Tensor, shift_mean: bool = True, out: Tensor | None = None
) -> Tensor:
    """`masked_whiten` for float values and a bool mask; into `out`, which may be `values`."""
    mean, centred, var = _centre(values, selected, unbiased=True, out=out)
    whitened = centred.mul_(torch.rsqrt(var + WHITEN_EPSILON))
    return whitened if shift_mean else whitened.add_(selected * mean)


def _centre(
    values: Tensor, selected: Tensor, unbiased: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (0-d), values − mean under the mask and 0 elsewhere, variance (0-d)."""
    count = int(torch.count_nonzero(selected))
    if count == 0:
        nothing = values.new_zeros(())
        return nothing, torch.zeros_like(values) if out is None else out.zero_(), nothing
    # Bytes and rows: searches of bool tensors are many times slower.
    width = max(selected.shape[-1], 1) if selected.dim() else 1
    flags = selected.view(torch.uint8).reshape(-1, width)
    row = int(flags.amax(-1).argmax())
    some = values.reshape(flags.shape)[row, int(flags[row].argmax())].clone()
    if out is None and not values.requires_grad:
        out = room(values.shape, values)
    offset = torch.where(selected, values, some, out=out).sub_(some)
    gap = offset.sum() / count
    centred = torch.where(selected, offset, gap, out=offset).sub_(gap)
    degrees = max(count - 1, 1) if unbiased else count
    return some + gap, centred, torch.linalg.vector_norm(centred).square() / degrees
