"""KL over the whole vocabulary from hidden states, without ever holding all the logits.

Legend: N tokens, V words, D and E hidden sizes of policy and reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quadriga.algorithms.full_kl import blocks, p_and_gap
from quadriga.errors import AlgorithmError, ShapeError
from quadriga.models.softmax_tiles import (
    Scratch,
    add_product,
    check_weight,
    product,
    spans,
    wide_dtype,
)

# Logits of one model alive at once; a chunk holds the whole vocabulary.
_CPU_CHUNK, _ACCELERATOR_CHUNK = 2**22, 2**27


def linear_full_kl(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    ref_hidden_NE: Tensor,
    ref_weight_VE: Tensor,
    temperature: float = 1.0,
    *,
    chunk_elements: int | None = None,
) -> Tensor:
    """`kl_full` of the logits hidden @ weightᵀ of policy and reference: [N], nats.

    Differentiable in the policy's hidden states and weight. Two chunks of logits are alive at
    once; the backward pass makes them again.

    Args:
        chunk_elements: logits of a chunk (at least one token); None: what suits the device.

    Raises:
        ShapeError: the four do not fit. AlgorithmError: temperature not above 0.
    """
    check_weight(hidden_ND, weight_VD)
    check_weight(ref_hidden_NE, ref_weight_VE)
    for name, ref, like in (
        ("ref_hidden", ref_hidden_NE, hidden_ND),
        ("ref_weight", ref_weight_VE, weight_VD),
    ):
        if len(ref) != len(like):
            raise ShapeError(
                f"`{name}` has {len(ref)} rows, but the policy's has {len(like)}; both must "
                "describe the same tokens and words.",
                tensor=name,
                expected=len(like),
                got=len(ref),
            )
    if not temperature > 0:
        raise AlgorithmError(f"`temperature` must be above 0, but is {temperature}.")
    on_cpu = hidden_ND.device.type == "cpu"
    elements = chunk_elements or (_CPU_CHUNK if on_cpu else _ACCELERATOR_CHUNK)
    kl: Tensor = _LinearFullKL.apply(  # type: ignore[no-untyped-call]
        hidden_ND,
        weight_VD,
        ref_hidden_NE.detach(),
        ref_weight_VE.detach(),
        temperature,
        max(1, elements // len(weight_VD)),
    )
    return kl


class _LinearFullKL(torch.autograd.Function):
    """Chunks of tokens; what is kept are the inputs and one number a token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ref_hidden: Tensor,
        ref_weight: Tensor,
        temperature: float,
        tokens: int,
    ) -> Tensor:
        kl = torch.empty(len(hidden), dtype=wide_dtype(hidden), device=hidden.device)
        ours, theirs = (Scratch(hidden, kl.dtype) for _ in range(2))
        for a, b in spans(len(hidden), tokens):
            logits = product(hidden[a:b], weight.T, ours)
            ref_logits = product(ref_hidden[a:b], ref_weight.T, theirs)
            for c, d in blocks(logits):
                p, gap = p_and_gap(logits[c:d], ref_logits[c:d], temperature)
                torch.linalg.vecdot(p, gap, out=kl[a + c : a + d])
        ctx.save_for_backward(hidden, weight, ref_hidden, ref_weight, kl)
        ctx.temperature, ctx.tokens = temperature, tokens
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Any, ...]:
        hidden, weight, ref_hidden, ref_weight, kl = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=kl.dtype) if ctx.needs_input_grad[1] else None
        scale = grad_kl / ctx.temperature
        ours, theirs = (Scratch(hidden, kl.dtype) for _ in range(2))
        for a, b in spans(len(hidden), ctx.tokens):
            logits = product(hidden[a:b], weight.T, ours)
            ref_logits = product(ref_hidden[a:b], ref_weight.T, theirs)
            for c, d in blocks(logits):
                p, gap = p_and_gap(logits[c:d], ref_logits[c:d], ctx.temperature)
                gap.sub_(kl[a + c : a + d, None]).mul_(scale[a + c : a + d, None])
                torch.mul(p, gap, out=logits[c:d])
            if grad_hidden is not None:
                torch.mm(logits.to(weight.dtype), weight, out=grad_hidden[a:b])
            if grad_weight is not None:
                add_product(grad_weight, logits.T, hidden[a:b])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            *(None,) * 4,
        )
