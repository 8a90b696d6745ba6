"""Log-probabilities and entropies from hidden states, without ever holding all the logits.

- `linear_log_probs`: by tiles of the vocabulary; the backward pass makes each tile again. Its
  results are ordinary tensors, to be used in any loss.
- `linear_loss`: the loss is folded in. Each chunk of tokens goes forward and backward while its
  logits are at hand, so they are made once: three matrix products in place of four.

Legend: N tokens, V words, D hidden size. Results in nats, float32 (float64 for float64 inputs).
The matrix products run in the precision of the inputs, everything after them in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quadriga.errors import ShapeError
from quadriga.models.log_prob import wanted
from quadriga.models.softmax_tiles import (
    FLOOR,
    Scratch,
    add_product,
    check_inputs,
    check_weight,
    exp_sums,
    gradient_in_place,
    product,
    row_blocks,
    spans,
    wide_dtype,
)

# Logits alive at once: on a CPU what the cache holds; an accelerator wants large products.
_CPU_TILE, _ACCELERATOR_TILE = 2**20, 2**27
# Rows of a tile. More rows mean fewer passes over the weight's gradient.
_TILE_ROWS = 2048
# For the folded loss a chunk holds the whole vocabulary, so it is taller in exchange.
_CPU_CHUNK, _ACCELERATOR_CHUNK = 2**23, 2**27

LossFn = Callable[[Tensor, Tensor, int, int], Tensor]


def linear_log_probs(
    hidden: Tensor,
    weight_VD: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    *,
    entropy: bool = True,
    tile_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probability of each label, entropy) of softmax(hidden @ weightᵀ / temperature).

    Args:
        hidden: [..., D]. weight_VD: [V, D], of the same dtype. labels: [...] int64, 0 … V-1.
        entropy: without it the second result is 0 and costs nothing.
        tile_elements: logits alive at once (two such tiles while entropy is wanted).

    Returns:
        Two tensors of the labels' shape; both differentiable in hidden and weight.

    Raises:
        ShapeError: hidden, weight and labels do not fit. AlgorithmError: temperature.
    """
    check_inputs(hidden, labels, temperature)
    check_weight(hidden, weight_VD)
    on_cpu = hidden.device.type == "cpu"
    log_prob, ent = _Linear.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]),
        weight_VD,
        labels.reshape(-1),
        temperature,
        entropy,
        tile_elements or (_CPU_TILE if on_cpu else _ACCELERATOR_TILE),
    )
    return log_prob.view(labels.shape), ent.view(labels.shape)


class _Linear(torch.autograd.Function):
    """Tiles of rows × words under a running log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        entropy: bool,
        tile: int,
    ) -> tuple[Tensor, Tensor]:
        log_prob = torch.empty(len(hidden), dtype=wide_dtype(hidden), device=hidden.device)
        log_total, ent = torch.empty_like(log_prob), torch.zeros_like(log_prob)
        for a, b in spans(len(hidden), _TILE_ROWS):
            running = _Running(b - a, log_prob, entropy)
            for v, w in spans(len(weight), tile // (b - a)):
                running.take(hidden[a:b], weight[v:w], labels[a:b] - v, temperature)
            log_prob[a:b], log_total[a:b], ent[a:b] = running.result()
        ctx.save_for_backward(hidden, weight, labels, log_total, ent)
        ctx.temperature, ctx.entropy, ctx.tile = temperature, entropy, tile
        return log_prob, ent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> tuple[Any, ...]:
        hidden, weight, labels, log_total, ent = ctx.saved_tensors
        wide = log_total.dtype
        grad_hidden = torch.zeros_like(hidden, dtype=wide)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        bonus = wanted(grad_entropy) if ctx.entropy else None
        logits, weights = (Scratch(hidden, wide) for _ in range(2))
        for a, b in spans(len(hidden), _TILE_ROWS):
            for v, w in spans(len(weight), ctx.tile // (b - a)):
                tile = product(hidden[a:b], weight[v:w].T, logits, ctx.temperature)
                tile.sub_(log_total[a:b, None])
                gradient_in_place(
                    tile,
                    labels[a:b],
                    grad_log_prob[a:b],
                    None if bonus is None else bonus[a:b],
                    ent[a:b],
                    weights,
                    offset=v,
                    temperature=ctx.temperature,
                )
                add_product(grad_hidden[a:b], tile, weight[v:w])
                if grad_weight is not None:
                    add_product(grad_weight[v:w], tile.T, hidden[a:b])
        return (
            grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            *(None,) * 4,
        )


class _Running:
    """Softmax statistics of rows, one tile of words after another.

    With m the largest logit so far, s = Σ exp(z − m) and e = Σ exp(z − m)·(z − m) are carried; a
    new m' makes of them c·s and c·(e + (m − m')·s), with c = exp(m − m').
    """

    def __init__(self, rows: int, like: Tensor, entropy: bool) -> None:
        self.largest = like.new_full((rows,), -torch.inf)
        self.total, self.weighted, self.at_label = like.new_zeros(3, rows).unbind()
        self.entropy = entropy
        self._logits, self._weights = (Scratch(like, like.dtype) for _ in range(2))

    def take(self, hidden: Tensor, weight: Tensor, place: Tensor, temperature: float) -> None:
        """One more tile; `place` is where in it each row's label lies, if it does."""
        tile = product(hidden, weight.T, self._logits, temperature)
        here = (place >= 0) & (place < tile.shape[1])
        found = tile.gather(1, place.clamp(0, tile.shape[1] - 1)[:, None])[:, 0]
        self.at_label = torch.where(here, found, self.at_label)
        largest = torch.maximum(self.largest, tile.amax(-1))
        shift = (self.largest - largest).clamp(min=FLOOR)
        scale = shift.exp()
        fresh = torch.empty_like(scale) if self.entropy else None
        total = exp_sums(tile.sub_(largest[:, None]), self._weights, fresh)
        if fresh is not None:
            self.weighted = scale * (self.weighted + shift * self.total) + fresh
        self.total = scale * self.total + total
        self.largest = largest

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probability at the label, log Σ exp, entropy) of each row."""
        log_sum = self.total.log()
        ent = log_sum - self.weighted / self.total if self.entropy else self.weighted
        return self.at_label - self.largest - log_sum, self.largest + log_sum, ent


@dataclass(frozen=True)
class LinearLoss:
    """Result of `linear_loss`: `loss` (0-d, differentiable), and for metrics, without gradient,
    `log_prob` and `entropy` (both [N])."""

    loss: Tensor
    log_prob: Tensor
    entropy: Tensor


def linear_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    labels_N: Tensor,
    loss_fn: LossFn,
    temperature: float = 1.0,
    *,
    boundaries: Sequence[int] | None = None,
    chunk_elements: int | None = None,
) -> LinearLoss:
    """Σ over chunks of loss_fn(log_prob, entropy, start, stop), forward and backward at once.

    Args:
        hidden_ND, weight_VD, labels_N: as in `linear_log_probs`, tokens in one row.
        loss_fn: gets log_prob and entropy of tokens start … stop-1 and returns their share of the
            loss (0-d), already divided by the global counts. It must not reach outside its
            tokens; other parameters that it uses get no gradient.
        boundaries: rising positions where chunks may end, from 0 to N; give the starts of the
            sequences and N if the loss needs whole ones. None: anywhere.
        chunk_elements: logits alive at once (but at least one token, or one stretch between
            boundaries).

    Raises:
        ShapeError: hidden, weight, labels or boundaries do not fit. AlgorithmError: temperature.
    """
    check_inputs(hidden_ND, labels_N, temperature)
    check_weight(hidden_ND, weight_VD)
    on_cpu = hidden_ND.device.type == "cpu"
    elements = chunk_elements or (_CPU_CHUNK if on_cpu else _ACCELERATOR_CHUNK)
    tokens = max(1, elements // weight_VD.shape[0])
    cuts = chunk_cuts(len(labels_N), tokens, boundaries)
    loss, log_prob, entropy = _LinearLoss.apply(  # type: ignore[no-untyped-call]
        hidden_ND, weight_VD, labels_N, loss_fn, temperature, cuts
    )
    return LinearLoss(loss, log_prob, entropy)


def chunk_cuts(count: int, tokens: int, boundaries: Sequence[int] | None) -> list[int]:
    """Rising positions 0 … count, at most `tokens` apart, or more where no boundary allows less.

    Raises:
        ShapeError: boundaries that do not rise from 0 to count.
    """
    if boundaries is None:
        return [*range(0, count, tokens), count]
    bounds = [int(position) for position in boundaries]
    if bounds[:1] != [0] or bounds[-1] != count or any(a > b for a, b in pairwise(bounds)):
        raise ShapeError(
            f"`boundaries` must rise from 0 to {count}, but they begin {bounds[:8]} and end with "
            f"{bounds[-1:]}.",
            tensor="boundaries",
        )
    cuts = [0]
    for here, after in pairwise(bounds):
        if after - cuts[-1] > tokens and here > cuts[-1]:
            cuts.append(here)
    return [*cuts, count]


class _LinearLoss(torch.autograd.Function):
    """Chunks of tokens, each forward and backward at once; what is kept are the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        loss_fn: LossFn,
        temperature: float,
        cuts: list[int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = wide_dtype(hidden)
        log_prob = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        ent = torch.empty_like(log_prob)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        loss = log_prob.new_zeros(())
        logits, weights = (Scratch(hidden, wide) for _ in range(2))
        for a, b in pairwise(cuts):
            chunk = product(hidden[a:b], weight.T, logits, temperature)
            _to_log_p(chunk, labels[a:b], log_prob[a:b], ent[a:b], weights)
            share, pull, bonus = _loss_of_chunk(loss_fn, log_prob, ent, a, b)
            loss += share
            if grad_hidden is None and grad_weight is None:
                continue
            gradient_in_place(
                chunk, labels[a:b], pull, bonus, ent[a:b], weights, temperature=temperature
            )
            narrow = chunk.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(narrow, weight, out=grad_hidden[a:b])
            if grad_weight is not None:
                add_product(grad_weight, narrow.T, hidden[a:b])
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(log_prob, ent)
        return loss, log_prob, ent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *unused: Tensor) -> tuple[Any, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden * grad_loss.to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * grad_loss).to(ctx.weight_dtype),
            *(None,) * 4,
        )


def _to_log_p(
    chunk: Tensor, labels: Tensor, log_prob: Tensor, entropy: Tensor, scratch: Scratch
) -> None:
    """Turn logits into log p in place; fill log_prob and entropy of each row."""
    for a, b in row_blocks(chunk):
        rows = chunk[a:b]
        rows.sub_(rows.amax(-1, keepdim=True))
        total = exp_sums(rows, scratch, entropy[a:b])
        log_sum = total.log()
        torch.sub(log_sum, entropy[a:b] / total, out=entropy[a:b])
        rows.sub_(log_sum[:, None])
        log_prob[a:b] = rows.gather(1, labels[a:b, None])[:, 0]


def _loss_of_chunk(
    loss_fn: LossFn, log_prob: Tensor, entropy: Tensor, start: int, stop: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The chunk's share of the loss, and its gradient in log_prob and entropy (None: no part)."""
    with torch.enable_grad():
        lp = log_prob[start:stop].clone().requires_grad_()
        ent = entropy[start:stop].clone().requires_grad_()
        share = loss_fn(lp, ent, start, stop)
        if not share.requires_grad:
            return share, torch.zeros_like(lp), None
        pull, bonus = torch.autograd.grad(share, (lp, ent), allow_unused=True)
    return share.detach(), torch.zeros_like(lp) if pull is None else pull, bonus
