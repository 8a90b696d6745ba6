"""Discounted sums backwards in time, without a loop over tokens. Shapes: B samples, T tokens.

The recurrence x_t = d_t + c·x_{t+1} is a product with a triangular matrix of powers of c. It is
taken block by block of K tokens, all blocks at once; the first values of the blocks then follow
the same recurrence with c^K, and what flows into a block from the right is added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quadriga.algorithms.masked import room

_BLOCK = 32


def reverse_discounted_sum(terms_BT: Tensor, decay: float) -> Tensor:
    """x_t = Σ_{s≥t} decay^(s−t) · terms_s for each row; same shape and dtype."""
    count, width = terms_BT.shape
    powers = _powers(_BLOCK, decay, terms_BT)
    if width == 0:
        return terms_BT.clone()
    if width <= _BLOCK:
        return terms_BT @ powers[:width, :width]
    spare = -width % _BLOCK
    padded = torch.nn.functional.pad(terms_BT, (0, spare)) if spare else terms_BT
    tiles = padded.reshape(-1, _BLOCK)
    blocks = torch.mm(tiles, powers, out=room(tiles.shape, tiles)).view(count, -1, _BLOCK)
    first = reverse_discounted_sum(blocks[:, :, 0], decay**_BLOCK)
    # x at the start of the block to the right reaches position i with decay^(K − i).
    blocks[:, :-1].addcmul_(first[:, 1:, None], decay * powers[-1])
    return blocks.view(count, -1)[:, :width]


def _powers(size: int, decay: float, like: Tensor) -> Tensor:
    """[size, size]: entry (s, t) is decay^(s−t) where s ≥ t, else 0."""
    steps = torch.arange(size, device=like.device)
    gap = steps[:, None] - steps[None, :]
    column = torch.tensor([decay**k for k in range(size)], dtype=like.dtype, device=like.device)
    return column[gap.clamp(min=0)].masked_fill(gap < 0, 0)


def starts_at_front(mask_BT: Tensor) -> bool:
    """True if every row of the bool mask is ones, then zeros: neither left padding nor holes."""
    if mask_BT.shape[1] < 2 or mask_BT.shape[0] == 0:
        return True
    rises = mask_BT[:, 1:] > mask_BT[:, :-1]
    return not bool(rises.view(torch.uint8).max())


def close_holes(mask_BT: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Move each row's masked values to its front, order kept; (new mask, moved tensors …).

    Afterwards neighbours in memory are neighbours in time for the policy: an observation between
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
