"""KL(π‖π_ref) over the whole vocabulary, exact in value and gradient. Shapes: N tokens, V words.

    KL = Σ_v π_v (log π_v − log π_ref,v),   ∂KL/∂z_v = π_v (log π_v − log π_ref,v − KL)

with z the policy's logits over the temperature. The reference is a constant: it gets no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quadriga.algorithms.checks import as_float, require_same_shape
from quadriga.errors import AlgorithmError

# Logits worked on at once: 1 MB of float32 on a CPU, whose caches then hold them.
_CPU_BLOCK, _ACCELERATOR_BLOCK = 2**18, 2**25


def kl_full(logits: Tensor, ref_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(π‖π_ref) of each token, [..., V] twice → [...], nats, at least float32.

    Both distributions are softmax(logits / temperature). A word that π excludes (logit −inf) adds
    nothing; one that only π_ref excludes makes KL infinite. The backward pass makes one tensor of
    the logits' shape and dtype, no other.

    Raises:
        ShapeError: the models' logits differ in shape. AlgorithmError: temperature not above 0.
    """
    require_same_shape("logits", logits, ref_logits=ref_logits)
    if not temperature > 0:
        raise AlgorithmError(f"`temperature` must be above 0, but is {temperature}.")
    words = logits.shape[-1]
    kl: Tensor = _FullKL.apply(  # type: ignore[no-untyped-call]
        logits.reshape(-1, words), ref_logits.detach().reshape(-1, words), temperature
    )
    return kl.view(logits.shape[:-1])


class _FullKL(torch.autograd.Function):
    """A block of rows at a time; what is kept are both models' logits and one number a row."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ref_logits: Tensor, temperature: float) -> Tensor:
        kl = as_float(logits.new_empty(len(logits)))
        for a, b in blocks(logits):
            p, gap = p_and_gap(logits[a:b], ref_logits[a:b], temperature)
            torch.linalg.vecdot(p, gap, out=kl[a:b])
        ctx.save_for_backward(logits, ref_logits, kl)
        ctx.temperature = temperature
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Any, ...]:
        logits, ref_logits, kl = ctx.saved_tensors
        grad = torch.empty_like(logits)
        scale = grad_kl / ctx.temperature
        for a, b in blocks(logits):
            p, gap = p_and_gap(logits[a:b], ref_logits[a:b], ctx.temperature)
            grad[a:b] = gap.sub_(kl[a:b, None]).mul_(p).mul_(scale[a:b, None])
        return grad, None, None


def blocks(logits_NV: Tensor) -> Iterator[tuple[int, int]]:
    """Spans of rows to work on at once."""
    count, words = logits_NV.shape
    elements = _CPU_BLOCK if logits_NV.device.type == "cpu" else _ACCELERATOR_BLOCK
    step = max(1, elements // max(words, 1))
    return ((a, min(a + step, count)) for a in range(0, count, step))


def p_and_gap(logits: Tensor, ref_logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """π and log π − log π_ref (0 where π is 0), both [N, V], new tensors, at least float32."""
    log_p = torch.log_softmax(as_float(logits) / temperature, dim=-1)
    log_q = torch.log_softmax(as_float(ref_logits) / temperature, dim=-1)
    gap = torch.where(log_p == -torch.inf, 0, log_p - log_q)
    return log_p.exp_(), gap
