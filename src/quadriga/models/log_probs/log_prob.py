"""Log-probabilities of given tokens, and entropies, from logits that already exist.

`linear_log_prob.py` has the forms that start from hidden states and never hold all logits.

Shapes: [..., V] logits, [...] labels. Results are in nats and float32 (float64 for float64 logits),
whatever the dtype of the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quadriga.models.log_probs.softmax_tiles import (
    MIN_SHIFTED_LOGIT,
    SavedContext,
    ScratchBuffer,
    check_inputs,
    exp_sums,
    gradient_in_place,
    row_blocks,
    wide_dtype,
)


def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log softmax(logits / temperature) at the labels: [..., V], [...] int64 → [...].

    Differentiable. The backward pass allocates one tensor of the logits' shape and dtype.

    Raises:
        ShapeError: there is not one label for each row of logits.
        AlgorithmError: the temperature is not above 0.
    """
    return log_probs_and_entropy(logits, labels, temperature, entropy=False)[0]


def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the entropy of softmax(logits / temperature): [..., V] → [...].

    A logit of −inf contributes 0.

    Raises:
        AlgorithmError: the temperature is not above 0.
    """
    labels = torch.zeros(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    return log_probs_and_entropy(logits, labels, temperature)[1]


def log_probs_and_entropy(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, *, entropy: bool = True
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies, both [...], in one pass over the logits.

    Without `entropy` the second result is 0 and is not computed.

    Raises:
        ShapeError: there is not one label for each row of logits.
        AlgorithmError: the temperature is not above 0.
    """
    check_inputs(logits, labels, temperature)
    flat = logits.reshape(-1, logits.shape[-1])
    log_prob, ent = _FromLogits.apply(  # type: ignore[no-untyped-call]  # torch has no annotations
        flat, labels.reshape(-1), temperature, entropy
    )
    return log_prob.view(labels.shape), ent.view(labels.shape)


class _LogitsContext(SavedContext, Protocol):
    temperature: float
    entropy: bool


class _FromLogits(torch.autograd.Function):
    """Softmax statistics, one block of rows at a time.

    The backward pass needs the logits themselves and two numbers a row, so no tensor of the logits'
    shape is saved besides the input.
    """

    @staticmethod
    def forward(
        ctx: _LogitsContext, logits: Tensor, labels: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = wide_dtype(logits)
        log_prob = torch.empty(len(logits), dtype=dtype, device=logits.device)
        log_total, ent = torch.empty_like(log_prob), torch.zeros_like(log_prob)
        copies, weights = ScratchBuffer(logits, dtype), ScratchBuffer(logits, dtype)
        for a, b in row_blocks(logits):
            rows = copies(b - a, logits.shape[1]).copy_(logits[a:b])
            if temperature != 1.0:
                rows.div_(temperature)
            at_label = rows.gather(1, labels[a:b, None])[:, 0]
            # With m the largest logit: log Σ exp z = m + log Σ exp(z − m), which cannot overflow,
            # and H = log Σ exp(z − m) − Σ p (z − m).
            largest = rows.amax(-1)
            rows.sub_(largest[:, None]).clamp_(min=MIN_SHIFTED_LOGIT)
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
    def backward(
        ctx: _LogitsContext, grad_log_prob: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        logits, labels, log_total, ent = ctx.saved_tensors
        grad = torch.empty_like(logits)
        used_grad_entropy = nonzero_or_none(grad_entropy) if ctx.entropy else None
        copies, weights = (ScratchBuffer(logits, log_total.dtype) for _ in range(2))
        for a, b in row_blocks(logits):
            rows = copies(b - a, logits.shape[1]).copy_(logits[a:b])
            if ctx.temperature != 1.0:
                rows.div_(ctx.temperature)
            rows.sub_(log_total[a:b, None]).clamp_(min=MIN_SHIFTED_LOGIT)
            gradient_in_place(
                rows,
                labels[a:b],
                grad_log_prob[a:b],
                None if used_grad_entropy is None else used_grad_entropy[a:b],
                ent[a:b],
                weights,
                temperature=ctx.temperature,
            )
            grad[a:b] = rows
        return grad, None, None, None


def nonzero_or_none(grad: Tensor) -> Tensor | None:
    """Return `grad`, or None if it is all zero, so that its half of the backward can be skipped."""
    if grad.is_meta:
        return grad if _META_ENTROPIES_HAVE_GRADIENTS.get() else None
    return grad if bool(grad.any()) else None


_META_ENTROPIES_HAVE_GRADIENTS: ContextVar[bool] = ContextVar("meta_entropies", default=True)


@contextmanager
def meta_entropies_have_gradients(value: bool) -> Iterator[None]:
    """Say, in the block, whether gradients of entropies on the meta device count as nonzero."""
    token = _META_ENTROPIES_HAVE_GRADIENTS.set(value)
    try:
        yield
    finally:
        _META_ENTROPIES_HAVE_GRADIENTS.reset(token)
