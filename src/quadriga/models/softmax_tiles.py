"""The arithmetic that the log-probability functions share: tiles of logits, worked on in place.

Everything runs in float32 (float64 for float64 inputs). On a CPU the element-wise work goes by
blocks of rows that fit the cache, and buffers are used again, because fresh memory costs a page
fault for every 4 kB of it.

Legend: N tokens (rows), V words (columns), D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from quadriga.errors import AlgorithmError, ShapeError

# Elements of one block of rows on a CPU: 1 MB of float32.
_CACHE_BLOCK = 2**18
# Below this a logit (less the row's largest) has probability 0; it keeps 0·log 0 from being NaN.
FLOOR = -1e4


def check_inputs(features: Tensor, labels: Tensor, temperature: float) -> None:
    """Raise unless there is a label for each row of `features` and the temperature is above 0."""
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
    """Raise `ShapeError` unless the head's weight is [V, D] for these hidden states."""
    if weight_VD.dim() != 2 or weight_VD.shape[1] != hidden.shape[-1]:
        raise ShapeError(
            f"`weight` has shape {list(weight_VD.shape)}, but [V, {hidden.shape[-1]}] is needed "
            f"for hidden states of size {hidden.shape[-1]}.",
            tensor="weight",
            got=tuple(weight_VD.shape),
        )


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def spans(count: int, step: int) -> Iterator[tuple[int, int]]:
    """(0, step), (step, 2·step) … up to `count`."""
    return pairwise([*range(0, count, max(step, 1)), count])


def row_blocks(tile_NV: Tensor) -> Iterator[tuple[int, int]]:
    """Spans of rows to work on at once: a cacheful on a CPU, all of them elsewhere."""
    count, words = tile_NV.shape
    on_cpu = tile_NV.device.type == "cpu"
    return spans(count, _CACHE_BLOCK // max(words, 1) if on_cpu else max(count, 1))


class Scratch:
    """A buffer that is used again, grown when a larger one is asked for."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._flat = torch.empty(0, dtype=dtype, device=like.device)

    def __call__(self, rows: int, columns: int) -> Tensor:
        """An uninitialised [rows, columns] of the buffer; the last one given is overwritten."""
        if self._flat.numel() < rows * columns:
            self._flat = torch.empty(
                rows * columns, dtype=self._flat.dtype, device=self._flat.device
            )
        return self._flat[: rows * columns].view(rows, columns)


def product(left: Tensor, right: Tensor, scratch: Scratch, temperature: float = 1.0) -> Tensor:
    """left @ right / temperature, in the scratch buffer's precision."""
    out = scratch(left.shape[0], right.shape[1])
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(left @ right)
    return out if temperature == 1.0 else out.div_(temperature)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right; the product in the precision of `right`, the sum in its own."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left.to(right.dtype) @ right)


def exp_sums(shifted: Tensor, scratch: Scratch, weighted: Tensor | None) -> Tensor:
    """Σ_v exp(z_v) of each row of z ≤ 0, [N]; fills `weighted` with Σ_v exp(z_v)·z_v if given."""
    total = shifted.new_empty(len(shifted))
    for a, b in row_blocks(shifted):
        rows = shifted[a:b]
        weights = torch.exp(rows, out=scratch(*rows.shape))
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
    scratch: Scratch,
    *,
    offset: int = 0,
    temperature: float = 1.0,
) -> None:
    """Turn a tile of log p (words `offset` …) into the gradient in its logits, in place.

    ∂ log p(y)/∂z_v = 1[v = y] − p_v;  ∂H/∂z_v = −p_v (log p_v + H);  z = logits / temperature.
    """
    scale = 1 / temperature
    pull = (grad_log_prob * scale)[:, None]
    bonus = None if grad_entropy is None else (grad_entropy * scale)[:, None]
    for a, b in row_blocks(log_p):
        rows = log_p[a:b]
        if bonus is None:
            rows.exp_().mul_(-pull[a:b])
        else:
            p = torch.exp(rows, out=scratch(*rows.shape))
            rows.add_(entropy[a:b, None]).mul_(-bonus[a:b]).sub_(pull[a:b]).mul_(p)
    place = labels - offset
    here = (place >= 0) & (place < log_p.shape[1])
    place = place.clamp(0, log_p.shape[1] - 1)[:, None]
    log_p.scatter_add_(1, place, (pull * here[:, None]).to(log_p.dtype))
