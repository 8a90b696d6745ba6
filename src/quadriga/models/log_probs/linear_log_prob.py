"""Log-probabilities and entropies from hidden states, without holding all logits at once.

- `linear_log_probs`: goes through tiles of the vocabulary. The backward pass computes each tile
  again. Its results are ordinary tensors and may be used in any loss.
- `linear_loss`: computes the loss too. Each chunk of tokens goes forward and backward while its
  logits exist, so they are computed once: three matrix products instead of four.

Shapes: N tokens, V vocabulary entries, D hidden size. Results are in nats and float32 (float64 for
float64 inputs). The matrix products run in the dtype of the inputs, everything else in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quadriga.errors import ShapeError
from quadriga.models.log_probs.log_prob import nonzero_or_none
from quadriga.models.log_probs.softmax_tiles import (
    MIN_SHIFTED_LOGIT,
    SavedContext,
    ScratchBuffer,
    accumulate_matmul,
    check_inputs,
    check_weight,
    exp_sums,
    gradient_in_place,
    has_cpu_tiles,
    row_blocks,
    scaled_matmul,
    spans,
    wide_dtype,
)

# Elements of a tile of logits. A CPU tile (4 MB) fits the cache; accelerators need large products.
CPU_TILE, ACCELERATOR_TILE = 2**20, 2**27
# Rows of a tile. The gradient of the weight is read and written once for every span of rows, so
# more rows mean less memory traffic.
_TILE_ROWS = 2048
# Elements of a chunk in `linear_loss`. A chunk spans the whole vocabulary, so it is larger.
_CPU_CHUNK, _ACCELERATOR_CHUNK = 2**23, 2**27

LossFn = Callable[[Tensor, Tensor, int, int], Tensor]
"""(log_prob, entropy, start, stop) -> 0-d share of the loss of the tokens start … stop-1."""

# How three tokens and a vocabulary of five are cut into tiles of 2 rows and 2 columns. Only one
# tile of logits exists at a time, in the order of the letters:
#
#                 v = 0 1   2 3   4
#   token 0      |   a   |   b  | c |
#   token 1      |   a   |   b  | c |
#   token 2      |   d   |   e  | f |
#
# A token's label is in one of its tiles: label 3 of token 1 is column 3 − 2 = 1 of tile b, and
# columns −1 … of the others are out of range.


def linear_log_probs(
    hidden: Tensor,
    weight_VD: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    *,
    entropy: bool = True,
    tile_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each label and the entropy.

    The distribution is softmax(hidden @ weightᵀ / temperature). Both results have the shape of the
    labels and are differentiable in `hidden` and `weight_VD`.

    Args:
        hidden: [..., D].
        weight_VD: [V, D], of the same dtype.
        labels: [...] int64, 0 … V-1.
        entropy: if False, the second result is 0 and is not computed.
        tile_elements: logits that exist at once (two such tiles if `entropy` is set).

    Raises:
        ShapeError: the shapes of hidden, weight and labels do not match.
        AlgorithmError: the temperature is not above 0.
    """
    check_inputs(hidden, labels, temperature)
    check_weight(hidden, weight_VD)
    log_prob, ent = _Linear.apply(  # type: ignore[no-untyped-call]  # torch has no annotations
        hidden.reshape(-1, hidden.shape[-1]),
        weight_VD,
        labels.reshape(-1),
        temperature,
        entropy,
        tile_elements or (CPU_TILE if has_cpu_tiles(hidden) else ACCELERATOR_TILE),
    )
    return log_prob.view(labels.shape), ent.view(labels.shape)


class _LinearContext(SavedContext, Protocol):
    temperature: float
    entropy: bool
    tile: int


class _Linear(torch.autograd.Function):
    """Online softmax over tiles of tokens × vocabulary."""

    @staticmethod
    def forward(
        ctx: _LinearContext,
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
            softmax = _OnlineSoftmax(b - a, log_prob, entropy)
            for v, w in spans(len(weight), tile // (b - a)):
                softmax.update(hidden[a:b], weight[v:w], labels[a:b] - v, temperature)
            log_prob[a:b], log_total[a:b], ent[a:b] = softmax.result()
        ctx.save_for_backward(hidden, weight, labels, log_total, ent)
        ctx.temperature, ctx.entropy, ctx.tile = temperature, entropy, tile
        return log_prob, ent

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _LinearContext, grad_log_prob: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_total, ent = ctx.saved_tensors
        wide = log_total.dtype
        grad_hidden = torch.zeros_like(hidden, dtype=wide)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        used_grad_entropy = nonzero_or_none(grad_entropy) if ctx.entropy else None
        logits, weights = (ScratchBuffer(hidden, wide) for _ in range(2))
        for a, b in spans(len(hidden), _TILE_ROWS):
            for v, w in spans(len(weight), ctx.tile // (b - a)):
                # log p = z − log Σ exp z. The sum over the whole vocabulary was saved, so each tile
                # gives its part of the gradient without the other tiles.
                tile = scaled_matmul(hidden[a:b], weight[v:w].T, logits, ctx.temperature)
                tile.sub_(log_total[a:b, None])
                gradient_in_place(
                    tile,
                    labels[a:b],
                    grad_log_prob[a:b],
                    None if used_grad_entropy is None else used_grad_entropy[a:b],
                    ent[a:b],
                    weights,
                    offset=v,
                    temperature=ctx.temperature,
                )
                accumulate_matmul(grad_hidden[a:b], tile, weight[v:w])
                if grad_weight is not None:
                    accumulate_matmul(grad_weight[v:w], tile.T, hidden[a:b])
        return (
            grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            *(None,) * 4,
        )


class _OnlineSoftmax:
    """Softmax statistics of rows, updated by one tile of the vocabulary after another.

    The state of a row is m, the largest logit so far, s = Σ exp(z − m) and
    e = Σ exp(z − m)·(z − m). A new maximum m' rescales s to c·s and e to c·(e + (m − m')·s), with
    c = exp(m − m').
    """

    # One row with the logits 1 3 | 2 5, two tiles:
    #
    #   tile    m    c = exp(m − m')    s                              e
    #   1 3     3         0             e⁻² + 1           = 1.1353     −2·e⁻²              = −0.2707
    #   2 5     5        e⁻²            c·1.1353 + e⁻³ + 1 = 1.2034    c·(−0.2707 − 2·1.1353)
    #                                                                  − 3·e⁻³             = −0.4933
    #
    # log Σ exp z = 5 + log 1.2034 = 5.1852, so log p(5) = −0.1852;
    # H = log s − e/s = 0.1852 + 0.4099 = 0.5951.

    def __init__(self, rows: int, like: Tensor, entropy: bool) -> None:
        self.largest = like.new_full((rows,), -torch.inf)
        self.total, self.weighted, self.at_label = like.new_zeros(3, rows).unbind()
        self.entropy = entropy
        self._logits, self._weights = (ScratchBuffer(like, like.dtype) for _ in range(2))

    def update(
        self, hidden: Tensor, weight: Tensor, label_column: Tensor, temperature: float
    ) -> None:
        """Add one tile. `label_column` may be out of range: the label is then in another tile."""
        tile = scaled_matmul(hidden, weight.T, self._logits, temperature)
        in_tile = (label_column >= 0) & (label_column < tile.shape[1])
        found = tile.gather(1, label_column.clamp(0, tile.shape[1] - 1)[:, None])[:, 0]
        self.at_label = torch.where(in_tile, found, self.at_label)
        largest = torch.maximum(self.largest, tile.amax(-1))
        # The clamp turns −inf of the first tile into a finite number: exp gives 0, 0 · shift is 0.
        shift = (self.largest - largest).clamp(min=MIN_SHIFTED_LOGIT)
        scale = shift.exp()
        weighted = torch.empty_like(scale) if self.entropy else None
        total = exp_sums(tile.sub_(largest[:, None]), self._weights, weighted)
        if weighted is not None:
            self.weighted = scale * (self.weighted + shift * self.total) + weighted
        self.total = scale * self.total + total
        self.largest = largest

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log-probability of the label, log Σ exp z, and the entropy of each row."""
        log_sum = self.total.log()
        ent = log_sum - self.weighted / self.total if self.entropy else self.weighted
        return self.at_label - self.largest - log_sum, self.largest + log_sum, ent


@dataclass(frozen=True)
class LinearLoss:
    """Result of `linear_loss`.

    Attributes:
        loss: 0-d, differentiable.
        log_prob, entropy: [N], without gradient, for metrics.
    """

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
    """Return Σ over chunks of loss_fn(log_prob, entropy, start, stop), with its gradients.

    The gradients of `hidden_ND` and `weight_VD` are computed in the forward pass; the backward pass
    only scales them.

    Args:
        hidden_ND, weight_VD, labels_N: as in `linear_log_probs`, with all tokens in one row.
        loss_fn: receives log_prob and entropy of the tokens start … stop-1 and returns their share
            of the loss (0-d), already divided by the global counts. It must not depend on other
            tokens. Other parameters that it uses receive no gradient.
        boundaries: ascending positions, from 0 to N, where a chunk may end. A loss that needs whole
            sequences gives the starts of the sequences and N. None: a chunk may end anywhere.
        chunk_elements: logits that exist at once (but at least one token, or all tokens between
            two boundaries).

    Raises:
        ShapeError: hidden, weight, labels or boundaries do not match.
        AlgorithmError: the temperature is not above 0.
    """
    check_inputs(hidden_ND, labels_N, temperature)
    check_weight(hidden_ND, weight_VD)
    elements = chunk_elements or (_CPU_CHUNK if has_cpu_tiles(hidden_ND) else _ACCELERATOR_CHUNK)
    tokens = max(1, elements // weight_VD.shape[0])
    cuts = chunk_cuts(len(labels_N), tokens, boundaries)
    loss, log_prob, entropy = _LinearLoss.apply(  # type: ignore[no-untyped-call]  # as above
        hidden_ND, weight_VD, labels_N, loss_fn, temperature, cuts
    )
    return LinearLoss(loss, log_prob, entropy)


def chunk_cuts(count: int, tokens: int, boundaries: Sequence[int] | None) -> list[int]:
    """Return ascending positions from 0 to `count` that are at most `tokens` apart.

    They are further apart only where no boundary allows a cut.

    Raises:
        ShapeError: `boundaries` do not ascend from 0 to `count`.
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
    # Three sequences of 3, 1 and 5 tokens (boundaries 0 3 4 9) and at most 4 tokens a chunk:
    # 4 − 0 fits, 9 − 0 does not, so cut at 4; the last chunk has 5 tokens because it is one
    # sequence. Result: 0 4 9.
    cuts = [0]
    for bound, following in pairwise(bounds):
        if following - cuts[-1] > tokens and bound > cuts[-1]:
            cuts.append(bound)
    return [*cuts, count]


class _LinearLossContext(SavedContext, Protocol):
    weight_dtype: torch.dtype


class _LinearLoss(torch.autograd.Function):
    """Forward and backward of each chunk of tokens in one go; only the gradients are saved."""

    @staticmethod
    def forward(
        ctx: _LinearLossContext,
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
        logits, weights = (ScratchBuffer(hidden, wide) for _ in range(2))
        for a, b in pairwise(cuts):
            chunk = scaled_matmul(hidden[a:b], weight.T, logits, temperature)
            _log_softmax_in_place(chunk, labels[a:b], log_prob[a:b], ent[a:b], weights)
            share, grad_log_prob, grad_entropy = _chunk_loss(loss_fn, log_prob, ent, a, b)
            loss += share
            if grad_hidden is None and grad_weight is None:
                continue
            gradient_in_place(
                chunk,
                labels[a:b],
                grad_log_prob,
                grad_entropy,
                ent[a:b],
                weights,
                temperature=temperature,
            )
            grad_logits = chunk.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[a:b])
            if grad_weight is not None:
                accumulate_matmul(grad_weight, grad_logits.T, hidden[a:b])
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(log_prob, ent)
        return loss, log_prob, ent

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _LinearLossContext, grad_loss: Tensor, *unused: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            None if grad_hidden is None else grad_hidden * grad_loss.to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * grad_loss).to(ctx.weight_dtype),
            *(None,) * 4,
        )


def _log_softmax_in_place(
    chunk: Tensor, labels: Tensor, log_prob: Tensor, entropy: Tensor, buffer: ScratchBuffer
) -> None:
    """Replace logits by log p; fill `log_prob` and `entropy` of each row."""
    for a, b in row_blocks(chunk):
        rows = chunk[a:b]
        rows.sub_(rows.amax(-1, keepdim=True))
        total = exp_sums(rows, buffer, entropy[a:b])
        log_sum = total.log()
        torch.sub(log_sum, entropy[a:b] / total, out=entropy[a:b])
        rows.sub_(log_sum[:, None])
        log_prob[a:b] = rows.gather(1, labels[a:b, None])[:, 0]


def _chunk_loss(
    loss_fn: LossFn, log_prob: Tensor, entropy: Tensor, start: int, stop: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a chunk's share of the loss and its gradients with respect to log_prob and entropy.

    The last one is None if the loss does not depend on the entropy.
    """
    with torch.enable_grad():
        lp = log_prob[start:stop].clone().requires_grad_()
        ent = entropy[start:stop].clone().requires_grad_()
        share = loss_fn(lp, ent, start, stop)
        if not share.requires_grad:
            return share, torch.zeros_like(lp), None
        grad_lp, grad_ent = torch.autograd.grad(share, (lp, ent), allow_unused=True)
    return share.detach(), torch.zeros_like(lp) if grad_lp is None else grad_lp, grad_ent
