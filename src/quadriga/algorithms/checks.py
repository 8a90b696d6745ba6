"""Validation of the tensors that enter the package, and conversion of masks and dtypes.

A check costs one reduction over the tensor. Only if that reduction shows a fault is the tensor
searched for the row to report. Positions outside the mask may hold any value, NaN included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quadriga.errors import MaskError, NonFiniteError, ShapeError

# Elements per block where several passes follow each other (512 kB of float32): few enough that a
# CPU's cache still holds the block in the next pass.
_CACHED = 2**17


def require_same_shape(name: str, like: Tensor, **tensors: Tensor) -> None:
    """Raise `ShapeError` unless every tensor in `tensors` has the shape of `like`.

    Args:
        name: the name of `like` in the error message.
        tensors: the tensors to check, by the name to report.
    """
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
    """Raise `ShapeError` unless `tensor` is 2-d, [samples, tokens]; B may be 0."""
    if tensor.dim() != 2:
        raise ShapeError(
            f"`{name}` must have shape [samples, tokens], but has shape {list(tensor.shape)}.",
            tensor=name,
            got=tuple(tensor.shape),
        )


def to_bool_mask(mask: Tensor, name: str = "response_mask") -> Tensor:
    """Return the mask as bool. A bool mask is returned as it is, not copied.

    Args:
        mask: bool, integer or floating, any shape.
        name: the name to report.

    Raises:
        MaskError: a value is neither 0 nor 1. The message names the first such row.
    """
    if mask.dtype == torch.bool:
        return mask
    if mask.numel() == 0:
        return mask.to(torch.bool)
    if mask.is_floating_point():
        result = mask != 0
        valid = bool((mask == result).all())
    else:
        result, valid = _integers_to_bool(mask)
    if not valid:
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


def _integers_to_bool(mask: Tensor) -> tuple[Tensor, bool]:
    """Return (mask != 0, whether every value is 0 or 1), reading `mask` from memory once.

    Works block by block, so that the conversion finds the block in cache after `aminmax`.
    """
    flags = torch.empty(mask.shape, dtype=torch.bool, device=mask.device)
    valid = True
    for block, flags_of_block in zip(row_blocks(mask), row_blocks(flags), strict=True):
        low, high = torch.aminmax(block)
        valid = valid and int(low) >= 0 and int(high) <= 1
        flags_of_block.copy_(block)
    return flags, valid


def row_blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Split a CPU tensor into views of a few rows that fit the cache; elsewhere return one view."""
    if tensor.device.type != "cpu" or tensor.numel() <= _CACHED:
        return (tensor,)
    return torch.split(tensor, max(1, _CACHED * len(tensor) // tensor.numel()))


def require_finite(mask: Tensor | None = None, **tensors: Tensor) -> None:
    """Raise `NonFiniteError` if a value under the mask is NaN or infinite.

    Args:
        mask: bool, the shape of each tensor; None checks every position.
        tensors: the tensors to check, by the name to report.
    """
    for name, tensor in tensors.items():
        values = tensor.detach()
        if mask is not None:
            values = values.masked_fill(~mask, 0)
        # A sum that contains NaN or infinity is NaN or infinite, so one reduction finds both.
        if not bool(torch.isfinite(values.sum())):
            _raise_non_finite(name, values)


def _raise_non_finite(name: str, values: Tensor) -> None:
    """Raise for the first NaN or infinite value; return if there is none."""
    bad = ~torch.isfinite(values)
    if not bool(bad.any()):
        # All values are finite and only their sum overflowed: 4 × 3e38 is inf in float32.
        return
    where = [int(i) for i in bad.nonzero()[0]]
    raise NonFiniteError(
        f"`{name}` is {values[tuple(where)].item()} at row {where[0]}"
        + (f", token {where[1]}" if len(where) > 1 else "")
        + f" ({int(bad.sum())} such values in all). Find the computation that produced it, or "
        f"set that sample's mask to 0.",
        tensor=name,
        row=where[0],
        position=tuple(where),
    )


def as_float(tensor: Tensor) -> Tensor:
    """Return `tensor` in at least float32: float64 stays, every other dtype becomes float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
