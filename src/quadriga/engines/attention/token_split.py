"""Attention over tokens that several ranks have in parts.

Every layer but attention works token by token, so a rank computes a slice of the N packed tokens.
Attention needs the others. Before it, ranks of sequence parallelism exchange tokens for heads
(DeepSpeed-Ulysses, arXiv 2309.14509), and ranks of context parallelism gather keys and values:

    of a rank                queries              keys and values
    before              n tokens, H heads      n tokens, Hk heads
    exchange            N / c,    H / s        N / c,    Hk / s
    gather              N / c,    H / s        N,        Hk / s
    after               n tokens, H heads

n = N / (c · s) with c ranks of context and s of sequence parallelism.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quadriga.parallel.model_parallel.model_ranks import ModelRanks
from quadriga.parallel.model_parallel.token_exchange import (
    exchange_heads,
    exchange_tokens,
    gather_tokens,
)


def query_range(tokens: int, ranks: ModelRanks) -> range | None:
    """Return the packed tokens whose queries a rank has in attention; None: all of them."""
    if ranks.context.size == 1:
        return None
    size = tokens // ranks.context.size
    return range(ranks.context.index * size, (ranks.context.index + 1) * size)


def before_attention(
    query: Tensor, key: Tensor, value: Tensor, ranks: ModelRanks
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange and gather what attention needs: [n, H, D] and [n, Hk, D] twice, as above."""
    sequence = ranks.sequence
    if sequence.size > 1:
        key, value = (repeated_heads(x, query.shape[1], sequence.size) for x in (key, value))
        if query.shape[-1] == value.shape[-1]:
            query, key, value = _exchanged_together((query, key, value), ranks)
        else:
            query, key, value = (exchange_heads(x, sequence) for x in (query, key, value))
    return query, gather_tokens(key, ranks.context), gather_tokens(value, ranks.context)


def after_attention(out: Tensor, ranks: ModelRanks) -> Tensor:
    """Return the outputs of the own tokens: [N / c, H / s, D] -> [n, H, D]."""
    return exchange_tokens(out, ranks.sequence)


def own_sinks(sinks: Tensor | None, ranks: ModelRanks) -> Tensor | None:
    """Return the sinks [H] of the heads that this rank computes."""
    if sinks is None or ranks.sequence.size == 1:
        return sinks
    return sinks.chunk(ranks.sequence.size)[ranks.sequence.index]


def key_repeats(key_heads: int, size: int) -> int:
    """Return how often each key head is repeated, so that `size` ranks have equally many."""
    return size // math.gcd(key_heads, size)


def repeated_heads(x: Tensor, heads: int, size: int) -> Tensor:
    """Repeat key heads [n, Hk, D] so that they divide over `size` ranks, each with its queries."""
    # 8 heads, 2 key heads a b, 4 ranks: a a b b. Ranks 0 and 1 have queries of a, 2 and 3 of b.
    times = key_repeats(x.shape[1], size)
    assert heads % size == 0 and heads % (x.shape[1] * times) == 0, (heads, x.shape[1], size)
    return x if times == 1 else x.repeat_interleave(times, 1)


def _exchanged_together(tensors: tuple[Tensor, ...], ranks: ModelRanks) -> tuple[Tensor, ...]:
    """Return `exchange_heads` of several tensors, in one collective."""
    size = ranks.sequence.size
    heads = [x.shape[1] // size for x in tensors]
    # The heads of rank 0 of each tensor, then those of rank 1, …
    parts = [x.reshape(len(x), size, x.shape[1] // size, x.shape[2]) for x in tensors]
    joined = exchange_heads(torch.cat(parts, 2).flatten(1, 2), ranks.sequence)
    return tuple(torch.split(joined, heads, 1))
