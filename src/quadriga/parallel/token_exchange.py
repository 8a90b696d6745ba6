"""Collectives through which gradients flow: tokens, heads and outputs between ranks.

Each is the transpose of its own backward pass, so that the gradients of all ranks of a group add up
to the gradient of one rank:

    forward                                    backward
    exchange_heads      all-to-all             the other way round
    gather_tokens       all-gather             reduce-scatter (sum)
    sum_tokens          reduce-scatter (sum)   all-gather
    join_outputs        all-gather             the own part: all ranks compute the same loss

On the meta device the results have their shapes, and nothing is exchanged (memory plan).

Shapes: n tokens of a rank, s ranks, H heads, D head size.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from quadriga.parallel.model_ranks import Subgroup

_Collective: TypeAlias = Callable[[Tensor, Subgroup], Tensor]


def exchange_heads(x: Tensor, ranks: Subgroup) -> Tensor:
    """All heads of own tokens -> own heads of all tokens: [n, H, D] -> [s · n, H / s, D]."""
    # Two ranks, tokens 0 1 on rank 0 and 2 3 on rank 1, heads a b c d. What each has:
    #
    #            before            after
    #   rank 0   0abcd 1abcd       0ab 1ab 2ab 3ab
    #   rank 1   2abcd 3abcd       0cd 1cd 2cd 3cd
    return _through(x, _to_heads, _to_tokens, ranks)


def exchange_tokens(x: Tensor, ranks: Subgroup) -> Tensor:
    """Invert `exchange_heads`: [s · n, H / s, D] -> [n, H, D]."""
    return _through(x, _to_tokens, _to_heads, ranks)


def gather_tokens(x: Tensor, ranks: Subgroup) -> Tensor:
    """Join the tokens of all ranks along dimension 0: [n, …] -> [s · n, …]."""
    return _through(x, _gathered, _summed, ranks)


def sum_tokens(x: Tensor, ranks: Subgroup) -> Tensor:
    """Add the tensors of all ranks, and keep the own tokens: [s · n, …] -> [n, …]."""
    return _through(x, _summed, _gathered, ranks)


def join_outputs(x: Tensor, counts: Sequence[int], ranks: Subgroup) -> Tensor:
    """Join outputs of different lengths: [counts[own], C] -> [sum of counts, C] on all ranks.

    All ranks must compute the same loss from the result: the gradient of a rank's outputs is that
    of its own loss.
    """
    if ranks.size == 1:
        return x
    out: Tensor = _JoinOutputs.apply(x, tuple(counts), ranks)  # type: ignore[no-untyped-call]  # …
    return out


def _through(x: Tensor, there: _Collective, back: _Collective, ranks: Subgroup) -> Tensor:
    """Return `there(x)`, whose backward pass is `back`."""
    if ranks.size == 1:
        return x
    out: Tensor = _Transposed.apply(x, there, back, ranks)  # type: ignore[no-untyped-call]  # torch
    return out


class _Transposed(torch.autograd.Function):
    """A collective in the forward pass, and its transpose in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: _Collective, back: _Collective, ranks: Subgroup
    ) -> Tensor:
        ctx.back, ctx.ranks = back, ranks
        return there(x, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.ranks), None, None, None


class _JoinOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: tuple[int, ...], ranks: Subgroup) -> Tensor:
        ctx.ranks, ctx.counts = ranks, counts
        longest = max(counts)
        padded = x.new_zeros(longest, *x.shape[1:])
        padded[: len(x)] = x
        parts = _gathered(padded, ranks).view(ranks.size, longest, *x.shape[1:])
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return torch.split(grad, list(ctx.counts))[ctx.ranks.index].contiguous(), None, None


def _to_heads(x: Tensor, ranks: Subgroup) -> Tensor:
    tokens, heads, *size = x.shape
    sent = x.reshape(tokens, ranks.size, heads // ranks.size, *size).transpose(0, 1)
    return _exchanged(sent, ranks).flatten(0, 1)


def _to_tokens(x: Tensor, ranks: Subgroup) -> Tensor:
    tokens, heads, *size = x.shape
    received = _exchanged(x.reshape(ranks.size, tokens // ranks.size, heads, *size), ranks)
    return received.transpose(0, 1).flatten(1, 2)


def _exchanged(parts: Tensor, ranks: Subgroup) -> Tensor:
    """Send part r of [s, …] to rank r."""
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    if not sent.is_meta:
        dist.all_to_all_single(received, sent, group=ranks.group)
    return received


def _gathered(x: Tensor, ranks: Subgroup) -> Tensor:
    sent = x.contiguous()
    whole = sent.new_empty(len(sent) * ranks.size, *sent.shape[1:])
    if not sent.is_meta:
        dist.all_gather_single(whole, sent, group=ranks.group)
    return whole


def _summed(x: Tensor, ranks: Subgroup) -> Tensor:
    sent = x.contiguous()
    own = sent.new_empty(len(sent) // ranks.size, *sent.shape[1:])
    if not sent.is_meta:
        dist.reduce_scatter_single(own, sent, group=ranks.group)
    return own
