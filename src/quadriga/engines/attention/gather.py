"""Read packed tokens by index.

Shapes: N packed tokens, M slots, H heads, D head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from quadriga.models.log_probs.softmax_tiles import SavedContext


def gather_tokens(tokens: Tensor, slots: Tensor) -> Tensor:
    """Return `tokens` [N, H, D] at the indices `slots` [M]: [M, H, D].

    The keys of a shared prompt are read by each of its rows, and their gradients are added. In 16
    bits each addition would round (64 rows: 64 roundings of 0.4 % in bfloat16), so they are added
    in float32.
    """
    if tokens.dtype.itemsize >= 4:
        return tokens.index_select(0, slots)
    gathered: Tensor = _Gather.apply(tokens, slots)  # type: ignore[no-untyped-call]  # of torch
    return gathered


class _GatherContext(SavedContext, Protocol):
    count: int


class _Gather(torch.autograd.Function):
    """`index_select` whose backward pass adds in float32."""

    @staticmethod
    def forward(ctx: _GatherContext, tokens: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.count = len(tokens)
        return tokens.index_select(0, slots)

    @staticmethod
    def backward(ctx: _GatherContext, grad: Tensor) -> tuple[Tensor, None]:
        (slots,) = ctx.saved_tensors
        sums = grad.new_zeros((ctx.count, *grad.shape[1:]), dtype=torch.float32)
        return sums.index_add_(0, slots, grad.float()).to(grad.dtype), None
