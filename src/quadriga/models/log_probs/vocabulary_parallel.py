"""Log-probabilities and entropies over a vocabulary that is split over ranks.

Each rank has the rows of the output layer for one part of the vocabulary, and all ranks have the
same hidden states. No rank holds the logits of another one, and each holds its own for a block of
targets at a time:

    tokens of the vocabulary      0 1 2 │ 3 4 5      label 4
    logits z on                   rank 0│rank 1
    largest logit m               max over ranks
    Σ exp(z − m), Σ exp(z − m)·(z − m), and z at the label (0 on rank 0)     one sum over ranks

Shapes: K targets, D hidden size, V vocabulary entries of this rank. Results are float32 (float64
for float64 inputs), in nats.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from quadriga.models.log_probs.softmax_tiles import SavedContext

BLOCK_LOGITS = 2**24
"""Logits of one block of targets on a rank: 64 MiB in float32."""


def vocabulary_parallel_log_probs(
    hidden_KD: Tensor,
    weight_VD: Tensor,
    labels_K: Tensor,
    temperature: float = 1.0,
    *,
    first: int,
    vocabulary: int,
    group: dist.ProcessGroup,
    entropy: bool = True,
    block_logits: int = BLOCK_LOGITS,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of softmax(hidden · weightᵀ / temperature), both [K].

    Differentiable; the gradient of `hidden_KD` is summed over the ranks. All ranks of `group` must
    call this, and its backward pass, together.

    Args:
        weight_VD: the rows of this rank, without padding. Ranks may have different numbers of rows.
        labels_K: int64, tokens of the whole vocabulary.
        first: the token of the first row of `weight_VD`.
        vocabulary: entries of the whole vocabulary.
        entropy: False: the second result is 0 and is not computed.
        block_logits: how many logits exist at once on a rank, about.
    """
    # Ranks may have different numbers of rows, but must make equally many blocks.
    step = max(1, block_logits * dist.get_world_size(group) // vocabulary)
    log_prob, ent = _VocabularyParallel.apply(  # type: ignore[no-untyped-call]  # of torch
        hidden_KD, weight_VD, labels_K - first, temperature, group, entropy, step
    )
    return log_prob, ent


class _Context(SavedContext, Protocol):
    temperature: float
    group: dist.ProcessGroup
    entropy: bool
    step: int


class _VocabularyParallel(torch.autograd.Function):
    """Saves the inputs and two numbers for each target; the backward pass computes logits again."""

    @staticmethod
    def forward(
        ctx: _Context,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        group: dist.ProcessGroup,
        entropy: bool,
        step: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature, ctx.group, ctx.entropy, ctx.step = temperature, group, entropy, step
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        log_prob = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        log_total, ent = torch.empty_like(log_prob), torch.zeros_like(log_prob)
        for rows in _blocks(len(hidden), ctx.step):
            logits = _logits(hidden[rows], weight, temperature, dtype)
            largest = _largest(logits, group)
            logits -= largest[:, None]
            inside, columns = _own_labels(labels[rows], len(weight))
            at_label = torch.zeros_like(largest)
            at_label[inside] = logits[inside, columns[inside]]
            weights = logits.exp()
            weighted = (weights * logits).sum(1) if entropy else torch.zeros_like(largest)
            sums = torch.stack([weights.sum(1), weighted, at_label])
            dist.all_reduce(sums, group=group)
            log_sum = sums[0].log()
            log_prob[rows] = sums[2] - log_sum
            log_total[rows] = largest + log_sum
            if entropy:
                ent[rows] = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, labels, log_total, ent)
        return log_prob, ent

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _Context, grad_log_prob: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_total, ent = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden, dtype=log_total.dtype)
        grad_weight = torch.zeros_like(weight, dtype=log_total.dtype)
        for rows in _blocks(len(hidden), ctx.step):
            logits = _logits(hidden[rows], weight, ctx.temperature, log_total.dtype)
            log_p = logits - log_total[rows, None]
            p = log_p.exp()
            # d log p(label) / dz = [label] − p and dH / dz = −p · (log p + H).
            grad = -p * grad_log_prob[rows, None]
            inside, columns = _own_labels(labels[rows], len(weight))
            grad[inside, columns[inside]] += grad_log_prob[rows][inside]
            if ctx.entropy:
                grad -= p * (log_p + ent[rows, None]) * grad_entropy[rows, None]
            grad /= ctx.temperature
            grad_hidden[rows] = grad @ weight.to(grad.dtype)
            grad_weight += grad.T @ hidden[rows].to(grad.dtype)
        dist.all_reduce(grad_hidden, group=ctx.group)
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), *[None] * 5


def _blocks(count: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, count, step)]


def _logits(hidden: Tensor, weight: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    return (hidden @ weight.T).to(dtype).div_(temperature)


def _largest(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the largest logit of each row over all ranks. A rank may have no logits."""
    least = logits.new_full((len(logits), 1), -torch.inf)
    largest = torch.cat((logits, least), 1).amax(1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def _own_labels(labels: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the rows whose label is one of this rank's, and the column of each label."""
    return (labels >= 0) & (labels < size), labels
