"""KL over the whole vocabulary from hidden states, without holding all logits at once.

Shapes: N tokens, V vocabulary entries, D and E hidden sizes of policy and reference.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quadriga.algorithms.full_kl import blocks, p_and_gap
from quadriga.errors import AlgorithmError, ShapeError
from quadriga.models.log_probs.softmax_tiles import (
    SavedContext,
    ScratchBuffer,
    accumulate_matmul,
    check_weight,
    has_cpu_tiles,
    scaled_matmul,
    spans,
    wide_dtype,
)

# Elements of a chunk: the logits of one model that exist at once. A chunk spans the whole
# vocabulary, because KL needs both distributions normalised before they are compared.
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
    """Return `kl_full` of the logits hidden @ weightᵀ of policy and reference: [N], nats.

    Differentiable in the policy's hidden states and weight. Two chunks of logits exist at once; the
    backward pass computes them again.

    Args:
        chunk_elements: logits of a chunk (at least one token). None: a size that suits the device.

    Raises:
        ShapeError: the shapes of the four tensors do not match.
        AlgorithmError: the temperature is not above 0.
    """
    check_weight(hidden_ND, weight_VD)
    check_weight(ref_hidden_NE, ref_weight_VE)
    for name, ref, like in (
        ("ref_hidden", ref_hidden_NE, hidden_ND),
        ("ref_weight", ref_weight_VE, weight_VD),
    ):
        if len(ref) != len(like):
            raise ShapeError(
                f"`{name}` has {len(ref)} rows, but the policy's has {len(like)}; both models must "
                "have the same tokens and the same vocabulary.",
                tensor=name,
                expected=len(like),
                got=len(ref),
            )
    if not temperature > 0:
        raise AlgorithmError(f"`temperature` must be above 0, but is {temperature}.")
    elements = chunk_elements or (_CPU_CHUNK if has_cpu_tiles(hidden_ND) else _ACCELERATOR_CHUNK)
    kl: Tensor = _LinearFullKL.apply(  # type: ignore[no-untyped-call]  # torch has no annotations
        hidden_ND,
        weight_VD,
        ref_hidden_NE.detach(),
        ref_weight_VE.detach(),
        temperature,
        max(1, elements // len(weight_VD)),
    )
    return kl


class _KLContext(SavedContext, Protocol):
    temperature: float
    tokens: int


class _LinearFullKL(torch.autograd.Function):
    """KL of one chunk of tokens after another. Saves the inputs and one number a token."""

    # Three tokens in chunks of 2, V = 3. gap = log π − log π_ref:
    #
    #                      π          π_ref           gap            KL = Σ π · gap
    #   chunk 0  token 0   .5 .3 .2   .4 .4 .2   .223 −.288 0   .112 − .086 = .025
    #            token 1   .1 .1 .8   .1 .1 .8     0     0  0                 .000
    #   chunk 1  token 2   …
    #
    # The gradient of token 0's logits is π · (gap − KL) / temperature
    #   = .5 · .198, .3 · (−.313), .2 · (−.025) = .099 −.094 −.005, which sums to 0.

    @staticmethod
    def forward(
        ctx: _KLContext,
        hidden: Tensor,
        weight: Tensor,
        ref_hidden: Tensor,
        ref_weight: Tensor,
        temperature: float,
        tokens: int,
    ) -> Tensor:
        kl = torch.empty(len(hidden), dtype=wide_dtype(hidden), device=hidden.device)
        policy_buffer, ref_buffer = (ScratchBuffer(hidden, kl.dtype) for _ in range(2))
        for a, b in spans(len(hidden), tokens):
            logits = scaled_matmul(hidden[a:b], weight.T, policy_buffer)
            ref_logits = scaled_matmul(ref_hidden[a:b], ref_weight.T, ref_buffer)
            for c, d in blocks(logits):
                p, gap = p_and_gap(logits[c:d], ref_logits[c:d], temperature)
                torch.linalg.vecdot(p, gap, out=kl[a + c : a + d])
        ctx.save_for_backward(hidden, weight, ref_hidden, ref_weight, kl)
        ctx.temperature, ctx.tokens = temperature, tokens
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: _KLContext, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, ref_hidden, ref_weight, kl = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=kl.dtype) if ctx.needs_input_grad[1] else None
        scale = grad_kl / ctx.temperature
        policy_buffer, ref_buffer = (ScratchBuffer(hidden, kl.dtype) for _ in range(2))
        for a, b in spans(len(hidden), ctx.tokens):
            logits = scaled_matmul(hidden[a:b], weight.T, policy_buffer)
            ref_logits = scaled_matmul(ref_hidden[a:b], ref_weight.T, ref_buffer)
            for c, d in blocks(logits):
                p, gap = p_and_gap(logits[c:d], ref_logits[c:d], ctx.temperature)
                gap.sub_(kl[a + c : a + d, None]).mul_(scale[a + c : a + d, None])
                torch.mul(p, gap, out=logits[c:d])  # the logits' memory now holds their gradient
            if grad_hidden is not None:
                torch.mm(logits.to(weight.dtype), weight, out=grad_hidden[a:b])
            if grad_weight is not None:
                accumulate_matmul(grad_weight, logits.T, hidden[a:b])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            *(None,) * 4,
        )
