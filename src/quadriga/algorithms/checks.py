"""The door: every tensor that enters the maths is looked at once, cheaply.

A check costs one reduction. Only when that one number says that something is wrong is the tensor
searched for the row to name. Positions outside the mask may hold anything, NaN included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quadriga.errors import MaskError, NonFiniteError, ShapeError

# Numbers worked on at once where several passes follow each other.
_CACHED = 2**17


def require_same_shape(name: str, like: Tensor, **tensors: Tensor) -> None:
    """Raise `ShapeError` unless every one of `tensors` has the shape of `like`, called `name`."""
    for other, tensor in tensors.items():
        if tensor.shape != like.shape:
            raise ShapeError(
                f"`{other}` has shape {list(tensor.shape)}, but `{name}` has {list(like.shape)}; "
                f"both must describe the same samples and tokens.",
                tensor=other,
                expected=tuple(like.shape),
                got=tuple(tensor.shape),
            )


def require_matrix(name: str, tensor: Tensor) -> None:
    """Raise `ShapeError` unless `tensor` is [B, T]; a part of a batch may have no samples."""
    if tensor.dim() != 2:
        raise ShapeError(
            f"`{name}` must be [samples, tokens], but has shape {list(tensor.shape)}.",
            tensor=name,
            got=tuple(tensor.shape),
        )


def to_bool_mask(mask: Tensor, name: str = "response_mask") -> Tensor:
    """The mask as bool. Raises `MaskError` naming the row where it is neither 0 nor 1.

    Accepts bool, integer and floating masks of any shape.
    """
    if mask.dtype == torch.bool:
        return mask
    if mask.numel() == 0:
        return mask.to(torch.bool)
    if mask.is_floating_point():
        result = mask != 0
        fine = bool((mask == result).all())
    else:
        result, fine = _flags_of_integers(mask)
    if not fine:
        wrong = (mask != result.to(mask.dtype)).reshape(mask.shape[0], -1)
        row = int(wrong.any(-1).nonzero()[0])
        value = mask.reshape(mask.shape[0], -1)[row][wrong[row]][0].item()
        raise MaskError(
            f"`{name}` must hold only 0 and 1, but row {row} holds {value}.",
            tensor=name,
            row=row,
            value=value,
        )
    return result


def _flags_of_integers(mask: Tensor) -> tuple[Tensor, bool]:
    """(mask ≠ 0, whether every number is 0 or 1), each number read from memory once."""
    flags = torch.empty(mask.shape, dtype=torch.bool, device=mask.device)
    fine = True
    for part, flags_of_part in zip(row_blocks(mask), row_blocks(flags), strict=True):
        low, high = torch.aminmax(part)
        fine = fine and int(low) >= 0 and int(high) <= 1
        flags_of_part.copy_(part)
    return flags, fine


def row_blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Views of a few rows each, small enough for a CPU's cache; elsewhere one view of all."""
    if tensor.device.type != "cpu" or tensor.numel() <= _CACHED:
        return (tensor,)
    return torch.split(tensor, max(1, _CACHED * len(tensor) // tensor.numel()))


def require_finite(mask: Tensor | None = None, **tensors: Tensor) -> None:
    """Raise `NonFiniteError` naming tensor and row if a value under the mask is NaN or infinite.

    Args:
        mask: bool, the shape of each tensor; None checks every position.
    """
    for name, tensor in tensors.items():
        values = tensor.detach()
        if mask is not None:
            values = values.masked_fill(~mask, 0)
        # NaN and infinity both survive a sum, so one reduction sees any of them.
        if not bool(torch.isfinite(values.sum())):
            _raise_non_finite(name, values)


def _raise_non_finite(name: str, values: Tensor) -> None:
    bad = ~torch.isfinite(values)
    if not bool(bad.any()):
        return  # a finite tensor whose sum overflows
    where = [int(i) for i in bad.nonzero()[0]]
    raise NonFiniteError(
        f"`{name}` is {values[tuple(where)].item()} at row {where[0]}"
        + (f", token {where[1]}" if len(where) > 1 else "")
        + f" ({int(bad.sum())} such values); find where it was computed, or mask that sample.",
        tensor=name,
        row=where[0],
        position=tuple(where),
    )


def as_float(tensor: Tensor) -> Tensor:
    """At least float32: half precision and integers are widened, float64 stays."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
