"""Discounted sums backwards in time without a loop over tokens. Shapes: B samples, T tokens.

The recurrence x_t = d_t + c·x_{t+1} is a product of the row d with a triangular matrix of powers
of c. The product is computed for all blocks of K tokens at once. The values at the starts of the
blocks then follow the same recurrence with c^K, and each block adds what comes from its right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quadriga.algorithms.masked import new_empty

_BLOCK = 32


# c = 0.5, d = 1 2 3 4, blocks of K = 2:
#
#     direct:                x_4 = 4,  x_3 = 3 + 2 = 5,  x_2 = 2 + 2.5 = 4.5,  x_1 = 1 + 2.25 = 3.25
#
#     sums within blocks:    [1 + 1, 2]  [3 + 2, 4]            =  [2, 2]  [5, 4]
#     first values:          2, 5 with decay c² = 0.25:          2 + 1.25 = 3.25,  5
#     add to the left block: 5 · [c², c] = [1.25, 2.5]         =  [3.25, 4.5]  [5, 4]
def reverse_discounted_sum(terms_BT: Tensor, decay: float) -> Tensor:
    """Return x_t = Σ_{s≥t} decay^(s−t) · terms_s for each row; same shape and dtype."""
    count, width = terms_BT.shape
    powers = _powers(_BLOCK, decay, terms_BT)
    if width == 0:
        return terms_BT.clone()
    if width <= _BLOCK:
        return terms_BT @ powers[:width, :width]
    spare = -width % _BLOCK
    padded = torch.nn.functional.pad(terms_BT, (0, spare)) if spare else terms_BT
    tiles = padded.reshape(-1, _BLOCK)
    blocks = torch.mm(tiles, powers, out=new_empty(tiles.shape, tiles)).view(count, -1, _BLOCK)
    first = reverse_discounted_sum(blocks[:, :, 0], decay**_BLOCK)
    # The first value of the next block reaches position i of this block with decay^(K − i). The
    # last row of `powers` holds decay^(K − 1 − i).
    blocks[:, :-1].addcmul_(first[:, 1:, None], decay * powers[-1])
    return blocks.view(count, -1)[:, :width]


def _powers(size: int, decay: float, like: Tensor) -> Tensor:
    """Return the matrix [size, size] with decay^(s−t) at row s, column t ≤ s, and 0 elsewhere."""
    # size = 3, decay = c:      1    0   0
    #                           c    1   0
    #                           c²   c   1
    steps = torch.arange(size, device=like.device)
    gap = steps[:, None] - steps[None, :]
    column = torch.tensor([decay**k for k in range(size)], dtype=like.dtype, device=like.device)
    return column[gap.clamp(min=0)].masked_fill(gap < 0, 0)


def is_left_aligned(mask_BT: Tensor) -> bool:
    """Return whether every row of the bool mask is ones followed by zeros."""
    if mask_BT.shape[1] < 2 or mask_BT.shape[0] == 0:
        return True
    # A 0 followed by a 1 is left padding or a gap. The maximum runs on bytes, which is faster
    # than `any` on bool.
    rises = mask_BT[:, 1:] > mask_BT[:, :-1]
    return not bool(rises.view(torch.uint8).max())


# Two rows, * outside the mask:
#
#     mask       1 0 0 1      tensor     a * * b      packed     a b      new mask     1 1
#                0 1 1 1                 * c d e                 c d e                 1 1 1
#
# The packed width is 3, the length of the longest row; the packed row "a b" ends with a 0.
def pack_left(mask_BT: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Move the values under the mask to the front of each row, in their order.

    Tokens that are adjacent in time are then adjacent in memory. An observation between two turns
    is not a time step: it has no value and no action of the policy.

    Returns:
        (new mask, moved tensors …), all [B, length of the longest row].
    """
    lengths_B = mask_BT.sum(-1)
    width = int(lengths_B.max()) if lengths_B.numel() else 0
    front = torch.arange(width, device=mask_BT.device)[None, :] < lengths_B[:, None]
    # `masked_select` and `masked_scatter_` both run in row-major order, so the k-th selected value
    # of a row lands at position k of the same row.
    moved = [
        tensor.new_zeros(front.shape).masked_scatter_(front, tensor.masked_select(mask_BT))
        for tensor in tensors
    ]
    return front, *moved


def unpack_left(packed_BS: Tensor, front_BS: Tensor, mask_BT: Tensor) -> Tensor:
    """Undo `pack_left` for one tensor.

    Args:
        packed_BS: a packed tensor, S the length of the longest row.
        front_BS: the new mask that `pack_left` returned.
        mask_BT: the mask that was passed to `pack_left`.

    Returns:
        [B, T], 0 outside the mask.
    """
    empty = packed_BS.new_zeros(mask_BT.shape)
    return empty.masked_scatter_(mask_BT, packed_BS.masked_select(front_BS))
