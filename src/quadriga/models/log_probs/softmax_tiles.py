"""Tile arithmetic shared by the log-probability and KL functions. Everything is done in place.

The element-wise work runs in float32 (float64 for float64 inputs). On a CPU it goes through a tile
in blocks of rows that fit the cache. Buffers are reused, because every 4 kB of fresh memory costs a
page fault.

Shapes: N tokens (the rows of a tile), V vocabulary entries (its columns), D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from quadriga.errors import AlgorithmError, ShapeError

# Elements of one block of rows on a CPU: 1 MB of float32.
_CACHE_BLOCK = 2**18
# Shifted logits (logit minus the largest of the row) are clamped here. exp(-1e4) is 0 in float32
# and float64, so the probability does not change, but 0 · log 0 = 0 · (-inf) = NaN is avoided.
MIN_SHIFTED_LOGIT = -1e4


_META_STANDS_FOR_CPU: ContextVar[bool] = ContextVar("meta_stands_for_cpu", default=False)


@contextmanager
def meta_tensors_stand_for_cpu(value: bool) -> Iterator[None]:
    """Say whether meta tensors have the tiles of a CPU, not of an accelerator, in the block."""
    token = _META_STANDS_FOR_CPU.set(value)
    try:
        yield
    finally:
        _META_STANDS_FOR_CPU.reset(token)


def has_cpu_tiles(tensor: Tensor) -> bool:
    """Return whether a tensor is cut into tiles that fit the cache of a CPU."""
    return tensor.device.type == "cpu" or (tensor.is_meta and _META_STANDS_FOR_CPU.get())


class SavedContext(Protocol):
    """The part of an autograd context that the functions of this package use."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors for the backward pass."""
        ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Declare outputs that have no gradient."""
        ...


def check_inputs(features: Tensor, labels: Tensor, temperature: float) -> None:
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
    if not temperature > 0:
        raise AlgorithmError(
            f"`temperature` must be above 0, but is {temperature}; for greedy samples use 1."
        )


def check_weight(hidden: Tensor, weight_VD: Tensor) -> None:
    """Raise `ShapeError` unless `weight_VD` is [V, D] for hidden states of size D."""
    if weight_VD.dim() != 2 or weight_VD.shape[1] != hidden.shape[-1]:
        raise ShapeError(
            f"`weight` has shape {list(weight_VD.shape)}, but [V, {hidden.shape[-1]}] is needed "
            f"for hidden states of size {hidden.shape[-1]}.",
            tensor="weight",
            got=tuple(weight_VD.shape),
        )


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of sums: float64 for float64 inputs, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def spans(count: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of consecutive spans of `step` that cover 0 … count. The last is shorter.

    spans(7, 3) yields (0, 3), (3, 6), (6, 7).
    """
    return pairwise([*range(0, count, max(step, 1)), count])


def row_blocks(tile_NV: Tensor) -> Iterator[tuple[int, int]]:
    """Yield spans of rows to process at once: as many as fit the cache on a CPU, else all."""
    count, vocabulary = tile_NV.shape
    cached = has_cpu_tiles(tile_NV)
    return spans(count, _CACHE_BLOCK // max(vocabulary, 1) if cached else max(count, 1))


class ScratchBuffer:
    """A reusable buffer. It grows when a larger one is requested."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._flat = torch.empty(0, dtype=dtype, device=like.device)

    def __call__(self, rows: int, columns: int) -> Tensor:
        """Return an uninitialised [rows, columns] view. It overwrites the view returned before."""
        if self._flat.numel() < rows * columns:
            self._flat = torch.empty(
                rows * columns, dtype=self._flat.dtype, device=self._flat.device
            )
        return self._flat[: rows * columns].view(rows, columns)


def scaled_matmul(
    left: Tensor, right: Tensor, buffer: ScratchBuffer, temperature: float = 1.0
) -> Tensor:
    """Return left @ right / temperature in `buffer`, in the buffer's dtype.

    The product itself runs in the dtype of its inputs, which bfloat16 hardware needs to be fast.
    """
    out = buffer(left.shape[0], right.shape[1])
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(left @ right)
    return out if temperature == 1.0 else out.div_(temperature)


def accumulate_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`: the product in the dtype of `right`, the sum in its own."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left.to(right.dtype) @ right)


def exp_sums(shifted: Tensor, buffer: ScratchBuffer, weighted: Tensor | None) -> Tensor:
    """Return Σ_v exp(z_v) of each row of shifted logits z ≤ 0, [N].

    If `weighted` [N] is given, it is filled with Σ_v exp(z_v)·z_v, which the entropy needs.
    """
    total = shifted.new_empty(len(shifted))
    for a, b in row_blocks(shifted):
        rows = shifted[a:b]
        weights = torch.exp(rows, out=buffer(*rows.shape))
        torch.sum(weights, -1, out=total[a:b])
        if weighted is not None:
            torch.linalg.vecdot(weights, rows, out=weighted[a:b])
    return total


def gradient_in_place(
    log_p: Tensor,
    labels: Tensor,
    grad_log_prob: Tensor,
    grad_entropy: Tensor | None,
    entropy: Tensor,
    buffer: ScratchBuffer,
    *,
    offset: int = 0,
    temperature: float = 1.0,
) -> None:
    """Replace a tile of log p by the gradient of the loss with respect to its logits.

    ∂ log p(y)/∂z_v = 1[v = y] − p_v;  ∂H/∂z_v = −p_v (log p_v + H);  z = logits / temperature.

    Args:
        log_p: [N, tile width], log-probabilities of the vocabulary entries `offset` … .
        labels: [N], numbered over the whole vocabulary.
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
    # only where the label is in this tile: with offset 2 and width 2, the labels 1, 3, 0 become the
    # columns −1, 1, −2, so only row 1 gets its g.
    scale = 1 / temperature
    scaled_grad = (grad_log_prob * scale)[:, None]
    scaled_entropy_grad = None if grad_entropy is None else (grad_entropy * scale)[:, None]
    for a, b in row_blocks(log_p):
        rows = log_p[a:b]
        if scaled_entropy_grad is None:
            rows.exp_().mul_(-scaled_grad[a:b])
        else:
            p = torch.exp(rows, out=buffer(*rows.shape))
            rows.add_(entropy[a:b, None]).mul_(-scaled_entropy_grad[a:b])
            rows.sub_(scaled_grad[a:b]).mul_(p)
    column = labels - offset
    in_tile = (column >= 0) & (column < log_p.shape[1])
    column = column.clamp(0, log_p.shape[1] - 1)[:, None]
    log_p.scatter_add_(1, column, (scaled_grad * in_tile[:, None]).to(log_p.dtype))
