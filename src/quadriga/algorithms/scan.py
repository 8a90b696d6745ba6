"""Discounted sums backwards in time, without a loop over tokens. Shapes: B samples, T tokens.

The recurrence x_t = d_t + c·x_{t+1} is a product with a triangular matrix of powers of c. Cut in
blocks of K tokens it is T/K matrix products, each fed the first value of the block after it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 64


def reverse_discounted_sum(terms_BT: Tensor, decay: float) -> Tensor:
    """x_t = Σ_{s≥t} decay^(s−t) · terms_s for each row; same shape and dtype."""
    width = terms_BT.shape[1]
    result = torch.empty_like(terms_BT)
    block = min(_BLOCK, max(width, 1))
    powers = _powers(block, decay, terms_BT)
    carry = torch.zeros_like(terms_BT[:, :1])
    for end in range(width, 0, -block):
        start = max(end - block, 0)
        size = end - start
        triangle = powers[:size, :size]
        # What flows in from the right reaches position i of the block with decay^(size − i).
        inflow = decay * powers[size - 1 : size, :size]
        piece = torch.addmm(carry * inflow, terms_BT[:, start:end], triangle)
        result[:, start:end] = piece
        carry = piece[:, :1]
    return result


def _powers(size: int, decay: float, like: Tensor) -> Tensor:
    """[size, size]: entry (s, t) is decay^(s−t) where s ≥ t, else 0."""
    steps = torch.arange(size, device=like.device)
    gap = steps[:, None] - steps[None, :]
    column = torch.tensor([decay**k for k in range(size)], dtype=like.dtype, device=like.device)
    return column[gap.clamp(min=0)].masked_fill(gap < 0, 0)


def has_holes(mask_BT: Tensor) -> bool:
    """True if a row's ones (bool mask) are not one contiguous run: observations between turns."""
    if mask_BT.shape[1] < 2:
        return False
    rises = (mask_BT[:, 1:] & ~mask_BT[:, :-1]).sum(-1) + mask_BT[:, 0]
    return bool((rises > 1).any())


def close_holes(mask_BT: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Move each row's masked values to its front, order kept; (new mask, moved tensors …).

    After it, neighbours in memory are neighbours in time for the policy: an observation between
    two turns has no value and no decision, so time does not pass in it.
    """
    lengths_B = mask_BT.sum(-1)
    width = int(lengths_B.max()) if lengths_B.numel() else 0
    front = torch.arange(width, device=mask_BT.device)[None, :] < lengths_B[:, None]
    moved = [
        tensor.new_zeros(front.shape).masked_scatter_(front, tensor.masked_select(mask_BT))
        for tensor in tensors
    ]
    return front, *moved


def reopen_holes(packed_BS: Tensor, front_BS: Tensor, mask_BT: Tensor) -> Tensor:
    """Undo `close_holes` for one tensor; 0 outside the mask."""
    empty = packed_BS.new_zeros(mask_BT.shape)
    return empty.masked_scatter_(mask_BT, packed_BS.masked_select(front_BS))
