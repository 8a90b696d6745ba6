"""Log-probabilities, entropy and KL of tokens, from logits or from hidden states.

- `log_probs_and_entropy`: from logits that already exist.
- `linear_log_probs`: from hidden states, through tiles of the vocabulary, which ranks may split.
  Its backward pass computes each tile again, so that all logits never exist at once.
- `linear_full_kl`: KL over the whole vocabulary from hidden states, in the same way.

Everything is done in place, in buffers that are used again: every 4 kB of fresh memory costs a page
fault. The matrix products run in the dtype of the inputs, everything else in float32 (float64 for
float64 inputs). On a CPU the element-wise work goes through a tile in blocks of rows that fit the
cache. Results are in nats.

Shapes: N tokens (the rows of a tile), V vocabulary entries (its columns), D and E hidden sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from quadriga.algorithms.full_kl import blocks, p_and_gap
from quadriga.errors import AlgorithmError, ShapeError

# Elements of a tile of logits. A CPU tile (4 MB) fits the cache; accelerators need large products.
CPU_TILE, ACCELERATOR_TILE = 2**20, 2**27
# Rows of a tile. The gradient of the weight is read and written once for every span of rows, so
# more rows mean less memory traffic.
_TILE_ROWS = 2048
# Elements of a chunk of `linear_full_kl`: the logits of one model that exist at once. A chunk spans
# the whole vocabulary, because KL needs both distributions normalised before they are compared.
_CPU_CHUNK, _ACCELERATOR_CHUNK = 2**22, 2**27
# Elements of one block of rows on a CPU: 1 MB of float32.
_CACHE_BLOCK = 2**18
# Shifted logits (logit minus the largest of the row) are clamped here. exp(-1e4) is 0 in float32
# and float64, so the probability does not change, but 0 · log 0 = 0 · (-inf) = NaN is avoided.
_MIN_SHIFTED_LOGIT = -1e4

_META: ContextVar[tuple[bool, bool]] = ContextVar("meta", default=(False, True))
"""Of tensors on the meta device: whether they have the tiles of a CPU, and whether gradients of
entropies count as nonzero."""


@contextmanager
def meta_tensors(*, stand_for_cpu: bool, entropies_have_gradients: bool) -> Iterator[None]:
    """Set what tensors on the meta device stand for, within the block."""
    token = _META.set((stand_for_cpu, entropies_have_gradients))
    try:
        yield
    finally:
        _META.reset(token)


# From logits.


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
    _check_labels(logits, labels, temperature)
    log_prob, ent = _LogProbs.apply(  # type: ignore[no-untyped-call]  # torch has no annotations
        logits.reshape(-1, logits.shape[-1]), None, labels.reshape(-1), temperature, entropy
    )
    return log_prob.view(labels.shape), ent.view(labels.shape)


# From hidden states.
#
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
#
# Ranks that split the vocabulary have their own rows of the weight and all hidden states. Each goes
# through its tiles; then a maximum and a sum over the ranks join the numbers of each token.


def linear_log_probs(
    hidden: Tensor,
    weight_VD: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    *,
    entropy: bool = True,
    tile_elements: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each label and the entropy.

    The distribution is softmax(hidden @ weightᵀ / temperature). Both results have the shape of the
    labels and are differentiable in `hidden` and `weight_VD`.

    Args:
        hidden: [..., D].
        weight_VD: [V, D], of the same dtype.
        labels: [...] int64, 0 … V-1; with `group` minus the number of the first row of `weight_VD`.
        entropy: if False, the second result is 0 and is not computed.
        tile_elements: logits that exist at once (two such tiles if `entropy` is set).
        group: ranks that split the vocabulary. All must call this, and its backward pass, together.
            The gradient of `hidden` is summed over them.

    Raises:
        ShapeError: there is not one label for each hidden state.
        AlgorithmError: the temperature is not above 0.
    """
    _check_labels(hidden, labels, temperature)
    log_prob, ent = _LogProbs.apply(  # type: ignore[no-untyped-call]  # torch has no annotations
        hidden.reshape(-1, hidden.shape[-1]),
        weight_VD,
        labels.reshape(-1),
        temperature,
        entropy,
        tile_elements or (CPU_TILE if _has_cpu_tiles(hidden) else ACCELERATOR_TILE),
        group,
    )
    return log_prob.view(labels.shape), ent.view(labels.shape)


def _tiles(
    inputs: Tensor, weight: Tensor | None, temperature: float, elements: int, buffer: _ScratchBuffer
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (tokens, vocabulary entries, their logits / temperature), in `buffer`.

    Without a weight the inputs are logits. A tile is then a block of rows with all their columns.
    """
    if weight is None:
        for a, b in _row_blocks(inputs):
            rows = buffer(b - a, inputs.shape[1]).copy_(inputs[a:b])
            yield slice(a, b), slice(0, inputs.shape[1]), _divided(rows, temperature)
        return
    for a, b in _spans(len(inputs), _TILE_ROWS):
        for v, w in _spans(len(weight), elements // (b - a)):
            tile = _matmul(inputs[a:b], weight[v:w].T, buffer)
            yield slice(a, b), slice(v, w), _divided(tile, temperature)


class _LogProbs(torch.autograd.Function):
    """Online softmax over tiles of tokens × vocabulary, from hidden states or from logits.

    Without a weight the inputs are logits. The backward pass needs the inputs themselves and two
    numbers a row, so no tensor of the shape of the logits is saved besides them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor | None,
        labels: Tensor,
        temperature: float,
        entropy: bool,
        elements: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> tuple[Tensor, Tensor]:
        statistics = torch.empty(4, len(inputs), dtype=_wide(inputs), device=inputs.device)
        softmax, buffer = _OnlineSoftmax(statistics, entropy), _ScratchBuffer(statistics)
        for rows, columns, tile in _tiles(inputs, weight, temperature, elements, buffer):
            # A logit that is given may be −inf.
            softmax.update(rows, tile, labels[rows] - columns.start, clamped=weight is None)
        log_prob, log_total, ent = softmax.result(group)
        ctx.save_for_backward(inputs, weight, labels, log_total, ent)
        ctx.temperature, ctx.entropy, ctx.size, ctx.group = temperature, entropy, elements, group
        return log_prob, ent

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor
    ) -> tuple[Tensor | None, ...]:
        inputs, weight, labels, log_total, ent = ctx.saved_tensors
        wide = log_total.dtype
        grad_weight = None
        if weight is None:
            grad_inputs = torch.empty_like(inputs)
        else:
            grad_inputs = torch.zeros_like(inputs, dtype=wide)
            if ctx.needs_input_grad[1]:
                grad_weight = torch.zeros_like(weight, dtype=wide)
        used_grad_entropy = _nonzero_or_none(grad_entropy) if ctx.entropy else None
        buffer, weights = _ScratchBuffer(log_total), _ScratchBuffer(log_total)
        for rows, columns, tile in _tiles(inputs, weight, ctx.temperature, ctx.size, buffer):
            # log p = z − log Σ exp z. The sum over the whole vocabulary was saved, so each tile
            # gives its part of the gradient without the other tiles.
            tile.sub_(log_total[rows, None])
            if weight is None:
                tile.clamp_(min=_MIN_SHIFTED_LOGIT)
            _gradient_in_place(
                tile, labels[rows] - columns.start, grad_log_prob[rows],
                None if used_grad_entropy is None else used_grad_entropy[rows], ent[rows], weights,
                ctx.temperature,
            )  # fmt: skip
            if weight is None:
                grad_inputs[rows] = tile
                continue
            _accumulate_matmul(grad_inputs[rows], tile, weight[columns])
            if grad_weight is not None:
                _accumulate_matmul(grad_weight[columns], tile.T, inputs[rows])
        if ctx.group is not None:
            dist.all_reduce(grad_inputs, group=ctx.group)
        return (
            grad_inputs.to(inputs.dtype),
            None if grad_weight is None else grad_weight.to(inputs.dtype),
            *(None,) * 5,
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

    def __init__(self, statistics: Tensor, entropy: bool) -> None:
        """`statistics`: [4, tokens], which are filled with m, s, e and the logit of the label."""
        self._all = statistics.zero_()
        self._all[0] = -torch.inf
        self._entropy = entropy
        self._weights = _ScratchBuffer(statistics)

    def update(self, rows: slice, tile: Tensor, label_column: Tensor, *, clamped: bool) -> None:
        """Add one tile of logits of these tokens, which is overwritten.

        `label_column` may be out of range: the label is then in another tile. `clamped`: a logit
        may be −inf.
        """
        statistics = self._all[:, rows]
        before, total, weighted, at_label = statistics.unbind()
        in_tile = (label_column >= 0) & (label_column < tile.shape[1])
        found = tile.gather(1, label_column.clamp(0, tile.shape[1] - 1)[:, None])[:, 0]
        at_label.copy_(torch.where(in_tile, found, at_label))
        largest = torch.maximum(before, tile.amax(-1))
        tile.sub_(largest[:, None])
        if clamped:
            tile.clamp_(min=_MIN_SHIFTED_LOGIT)
        of_tile = torch.empty_like(total) if self._entropy else None
        sums = _exp_sums(tile, self._weights, of_tile)
        _rescale(statistics, largest)
        if of_tile is not None:
            weighted.add_(of_tile)
        total.add_(sums)

    def result(self, group: dist.ProcessGroup | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log-probability of the label, log Σ exp z, and the entropy of each row.

        `group`: ranks that have the other tiles.
        """
        if group is not None:
            largest = self._all[0].clone()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            _rescale(self._all, largest)
            dist.all_reduce(self._all[1:], group=group)
        largest, total, weighted, at_label = self._all.unbind()
        log_sum = total.log()
        ent = log_sum - weighted / total if self._entropy else torch.zeros_like(total)
        return at_label - largest - log_sum, largest + log_sum, ent


def _rescale(statistics: Tensor, largest: Tensor) -> None:
    """Change m to `largest`, and s and e with it, in place."""
    before, total, weighted, _ = statistics.unbind()
    # The clamp turns −inf of the first tile into a finite number: exp gives 0, 0 · shift is 0.
    shift = (before - largest).clamp(min=_MIN_SHIFTED_LOGIT)
    scale = shift.exp()
    weighted.add_(shift * total).mul_(scale)
    total.mul_(scale)
    before.copy_(largest)


# KL.


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
        AlgorithmError: the temperature is not above 0.
    """
    assert len(ref_hidden_NE) == len(hidden_ND) and len(ref_weight_VE) == len(weight_VD)
    _check_temperature(temperature)
    elements = chunk_elements or (_CPU_CHUNK if _has_cpu_tiles(hidden_ND) else _ACCELERATOR_CHUNK)
    kl: Tensor = _LinearFullKL.apply(  # type: ignore[no-untyped-call]  # torch has no annotations
        hidden_ND,
        weight_VD,
        ref_hidden_NE.detach(),
        ref_weight_VE.detach(),
        temperature,
        max(1, elements // len(weight_VD)),
    )
    return kl


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
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ref_hidden: Tensor,
        ref_weight: Tensor,
        temperature: float,
        tokens: int,
    ) -> Tensor:
        kl = torch.empty(len(hidden), dtype=_wide(hidden), device=hidden.device)
        policy_buffer, ref_buffer = _ScratchBuffer(kl), _ScratchBuffer(kl)
        for a, b in _spans(len(hidden), tokens):
            logits = _matmul(hidden[a:b], weight.T, policy_buffer)
            ref_logits = _matmul(ref_hidden[a:b], ref_weight.T, ref_buffer)
            for c, d in blocks(logits):
                p, gap = p_and_gap(logits[c:d], ref_logits[c:d], temperature)
                torch.linalg.vecdot(p, gap, out=kl[a + c : a + d])
        ctx.save_for_backward(hidden, weight, ref_hidden, ref_weight, kl)
        ctx.temperature, ctx.size = temperature, tokens
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_kl: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, ref_hidden, ref_weight, kl = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=kl.dtype) if ctx.needs_input_grad[1] else None
        scale = grad_kl / ctx.temperature
        policy_buffer, ref_buffer = _ScratchBuffer(kl), _ScratchBuffer(kl)
        for a, b in _spans(len(hidden), ctx.size):
            logits = _matmul(hidden[a:b], weight.T, policy_buffer)
            ref_logits = _matmul(ref_hidden[a:b], ref_weight.T, ref_buffer)
            for c, d in blocks(logits):
                p, gap = p_and_gap(logits[c:d], ref_logits[c:d], ctx.temperature)
                gap.sub_(kl[a + c : a + d, None]).mul_(scale[a + c : a + d, None])
                torch.mul(p, gap, out=logits[c:d])  # the logits' memory now holds their gradient
            if grad_hidden is not None:
                torch.mm(logits.to(weight.dtype), weight, out=grad_hidden[a:b])
            if grad_weight is not None:
                _accumulate_matmul(grad_weight, logits.T, hidden[a:b])
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            *(None,) * 4,
        )


# Tiles.


def _has_cpu_tiles(tensor: Tensor) -> bool:
    """Return whether a tensor is cut into tiles that fit the cache of a CPU."""
    return tensor.device.type == "cpu" or (tensor.is_meta and _META.get()[0])


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise AlgorithmError(
            f"`temperature` must be above 0, but is {temperature}; for greedy samples use 1."
        )


def _check_labels(features: Tensor, labels: Tensor, temperature: float) -> None:
    """Check `features` [..., D or V] against `labels` [...], and the temperature.

    Raises:
        ShapeError: there is not one label for each row of `features`.
        AlgorithmError: the temperature is not above 0.
    """
    if features.shape[:-1] != labels.shape:
        raise ShapeError(
            f"`labels` has shape {list(labels.shape)}, but {list(features.shape[:-1])} is needed: "
            f"one label for each row of {list(features.shape)}.",
            tensor="labels",
            expected=tuple(features.shape[:-1]),
            got=tuple(labels.shape),
        )
    _check_temperature(temperature)


def _wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype of sums: float64 for float64 inputs, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _spans(count: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of consecutive spans of `step` that cover 0 … count. The last is shorter.

    _spans(7, 3) yields (0, 3), (3, 6), (6, 7).
    """
    return pairwise([*range(0, count, max(step, 1)), count])


def _row_blocks(tile_NV: Tensor) -> Iterator[tuple[int, int]]:
    """Yield spans of rows to process at once: as many as fit the cache on a CPU, else all."""
    count, vocabulary = tile_NV.shape
    cached = _has_cpu_tiles(tile_NV)
    return _spans(count, _CACHE_BLOCK // max(vocabulary, 1) if cached else max(count, 1))


class _ScratchBuffer:
    """A reusable buffer of the dtype and device of `like`. It grows when a larger one is needed."""

    def __init__(self, like: Tensor) -> None:
        self._flat = like.new_empty(0)

    def __call__(self, rows: int, columns: int) -> Tensor:
        """Return an uninitialised [rows, columns] view. It overwrites the view returned before."""
        if self._flat.numel() < rows * columns:
            self._flat = self._flat.new_empty(rows * columns)
        return self._flat[: rows * columns].view(rows, columns)


def _divided(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits by the temperature, in place."""
    return logits if temperature == 1.0 else logits.div_(temperature)


def _matmul(left: Tensor, right: Tensor, buffer: _ScratchBuffer) -> Tensor:
    """Return left @ right in `buffer`, in the buffer's dtype.

    The product itself runs in the dtype of its inputs, which bfloat16 hardware needs to be fast.
    """
    out = buffer(left.shape[0], right.shape[1])
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(left @ right)
    return out


def _accumulate_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`: the product in the dtype of `right`, the sum in its own."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left.to(right.dtype) @ right)


def _exp_sums(shifted: Tensor, buffer: _ScratchBuffer, weighted: Tensor | None) -> Tensor:
    """Return Σ_v exp(z_v) of each row of shifted logits z ≤ 0, [N].

    If `weighted` [N] is given, it is filled with Σ_v exp(z_v)·z_v, which the entropy needs.
    """
    total = shifted.new_empty(len(shifted))
    for a, b in _row_blocks(shifted):
        rows = shifted[a:b]
        weights = torch.exp(rows, out=buffer(*rows.shape))
        torch.sum(weights, -1, out=total[a:b])
        if weighted is not None:
            torch.linalg.vecdot(weights, rows, out=weighted[a:b])
    return total


def _gradient_in_place(
    log_p: Tensor,
    labels: Tensor,
    grad_log_prob: Tensor,
    grad_entropy: Tensor | None,
    entropy: Tensor,
    buffer: _ScratchBuffer,
    temperature: float,
) -> None:
    """Replace a tile of log p by the gradient of the loss with respect to its logits.

    ∂ log p(y)/∂z_v = 1[v = y] − p_v;  ∂H/∂z_v = −p_v (log p_v + H);  z = logits / temperature.

    Args:
        log_p: [N, tile width], log-probabilities of the vocabulary entries of a tile.
        labels: [N], columns of the tile; out of range if the label is in another tile.
        grad_log_prob: [N], gradient of the loss with respect to log p(label).
        grad_entropy: [N], the same for the entropy H. None: the loss does not depend on it.
        entropy: [N], H of each row.
    """
    # Three tokens, V = 4, temperature 1, no entropy gradient, g = grad_log_prob:
    #
    #             p                      label    g      gradient = g · (1[v = y] − p)
    #   row 0   0.25 0.25 0.25 0.25        1     1.0    -0.25  0.75 -0.25 -0.25
    #   row 1   0.10 0.20 0.30 0.40        3    -2.0     0.20  0.40  0.60 -1.20
    #   row 2   0.70 0.10 0.10 0.10        0     0.0     0.00  0.00  0.00  0.00
    #
    # First every entry becomes −g · p (one pass over the tile). Then g is added at each label, but
    # only where the label is in this tile: in the tile of the entries 2 and 3, the labels 1, 3, 0
    # are the columns −1, 1, −2, so only row 1 gets its g.
    scale = 1 / temperature
    scaled_grad = (grad_log_prob * scale)[:, None]
    scaled_entropy_grad = None if grad_entropy is None else (grad_entropy * scale)[:, None]
    for a, b in _row_blocks(log_p):
        rows = log_p[a:b]
        if scaled_entropy_grad is None:
            rows.exp_().mul_(-scaled_grad[a:b])
        else:
            p = torch.exp(rows, out=buffer(*rows.shape))
            rows.add_(entropy[a:b, None]).mul_(-scaled_entropy_grad[a:b])
            rows.sub_(scaled_grad[a:b]).mul_(p)
    in_tile = (labels >= 0) & (labels < log_p.shape[1])
    column = labels.clamp(0, log_p.shape[1] - 1)[:, None]
    log_p.scatter_add_(1, column, (scaled_grad * in_tile[:, None]).to(log_p.dtype))


def _nonzero_or_none(grad: Tensor) -> Tensor | None:
    """Return `grad`, or None if it is all zero, so that its half of the backward can be skipped."""
    used = _META.get()[1] if grad.is_meta else bool(grad.any())
    return grad if used else None
