"""Log-probabilities of given tokens, and entropies, from logits that exist already.

`linear_log_prob.py` has the forms that start from hidden states and never hold all the logits.
Shapes: [..., V] logits, [...] labels. Results in nats, float32 (float64 for float64 logits)
whatever the logits' precision.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quadriga.models.softmax_tiles import (
    FLOOR,
    Scratch,
    check_inputs,
    exp_sums,
    gradient_in_place,
    row_blocks,
    wide_dtype,
)


def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature) at the labels: [..., V], [...] int64 → [...].

    Differentiable; the backward pass makes one tensor of the logits' shape and dtype, no other.

    Raises:
        ShapeError: labels do not fit the logits. AlgorithmError: temperature not above 0.
    """
    return log_probs_and_entropy(logits, labels, temperature, entropy=False)[0]


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy of softmax(logits / temperature): [..., V] → [...]; words at −inf add nothing.

    Raises:
        AlgorithmError: temperature not above 0.
    """
    labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return log_probs_and_entropy(logits, labels, temperature)[1]


def log_probs_and_entropy(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, *, entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Both in one pass over the logits. Without `entropy` the second is 0 and costs nothing.

    Raises:
        ShapeError: labels do not fit the logits. AlgorithmError: temperature not above 0.
    """
    check_inputs(logits, labels, temperature)
    flat = logits.reshape(-1, logits.shape[-1])
    log_prob, ent = _FromLogits.apply(flat, labels.reshape(-1), temperature, entropy)  # type: ignore[no-untyped-call]
    return log_prob.view(labels.shape), ent.view(labels.shape)


class _FromLogits(torch.autograd.Function):
    """A block of rows at a time; what is kept are the logits as they came and two numbers a row."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = wide_dtype(logits)
        log_prob = torch.empty(len(logits), dtype=dtype, device=logits.device)
        log_total, ent = torch.empty_like(log_prob), torch.zeros_like(log_prob)
        copies, weights = Scratch(logits, dtype), Scratch(logits, dtype)
        for a, b in row_blocks(logits):
            rows = copies(b - a, logits.shape[1]).copy_(logits[a:b])
            if temperature != 1.0:
                rows.div_(temperature)
            at_label = rows.gather(1, labels[a:b, None])[:, 0]
            largest = rows.amax(-1)
            rows.sub_(largest[:, None]).clamp_(min=FLOOR)
            weighted = ent[a:b] if entropy else None
            total = exp_sums(rows, weights, weighted)
            log_sum = total.log()
            if weighted is not None:
                torch.sub(log_sum, weighted / total, out=weighted)
            log_total[a:b] = largest + log_sum
            log_prob[a:b] = at_label - largest - log_sum
        ctx.save_for_backward(logits, labels, log_total, ent)
        ctx.temperature, ctx.entropy = temperature, entropy
        return log_prob, ent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> tuple[Any, ...]:
        logits, labels, log_total, ent = ctx.saved_tensors
        grad = torch.empty_like(logits)
        bonus = wanted(grad_entropy) if ctx.entropy else None
        copies, weights = (Scratch(logits, log_total.dtype) for _ in range(2))
        for a, b in row_blocks(logits):
            rows = copies(b - a, logits.shape[1]).copy_(logits[a:b])
            if ctx.temperature != 1.0:
                rows.div_(ctx.temperature)
            rows.sub_(log_total[a:b, None]).clamp_(min=FLOOR)
            gradient_in_place(
                rows,
                labels[a:b],
                grad_log_prob[a:b],
                None if bonus is None else bonus[a:b],
                ent[a:b],
                weights,
                temperature=ctx.temperature,
            )
            grad[a:b] = rows
        return grad, None, None, None


def wanted(grad: Tensor) -> Tensor | None:
    """A gradient, or None if it is all zero: then its half of the backward pass is left out."""
    return grad if bool(grad.any()) else None
