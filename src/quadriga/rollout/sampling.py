"""Drawing tokens: one uniform number per (sample seed, token place), by inverse CDF.

A row's draws are a function of its own seed and its own logits, so they depend neither on the
number of workers nor on what else is in the batch.
Shapes: B rows, V words.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quadriga.rollout.base import SamplingParams


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finalizer (Steele, Lea and Flood, OOPSLA 2014) on int64, modulo 2^64."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(seeds_B: Tensor, place: int) -> Tensor:
    """[B] float64 in [0, 1): a function of seed and place alone."""
    state = _mix(seeds_B + _GOLDEN) + _signed((place + 1) * 0x9E3779B97F4A7C15 % (1 << 64))
    return _shift_right(_mix(state), 11).to(torch.float64) * 2.0**-53


def _filtered(scores_BV: Tensor, sampling: SamplingParams) -> Tensor:
    """Scores with -inf at words that top-k, then top-p leave out. Ties at the border stay in."""
    if 0 < sampling.top_k < scores_BV.shape[-1]:
        kth = scores_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < kth, -math.inf)
    if sampling.top_p < 1.0:
        ordered, order = scores_BV.sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs  # the most likely word always stays
        drop = torch.zeros_like(before, dtype=torch.bool).scatter(
            -1, order, before >= sampling.top_p
        )
        scores_BV = scores_BV.masked_fill(drop, -math.inf)
    return scores_BV


def draw(
    logits_BV: Tensor, sampling: SamplingParams, seeds_B: Tensor, place: int
) -> tuple[Tensor, Tensor]:
    """([B] int64 tokens, [B] float32 log-probabilities before top-k and top-p)."""
    scores = logits_BV.float()
    if sampling.greedy:
        token = scores.argmax(-1)
    else:
        if sampling.temperature != 1.0:
            scores = scores / sampling.temperature
        token = _inverse_cdf(_filtered(scores, sampling), uniform(seeds_B, place))
    log_prob = scores.gather(-1, token[:, None])[:, 0] - scores.logsumexp(-1)
    return token, log_prob


def _inverse_cdf(scores_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The first word whose cumulative probability is above the uniform number."""
    cdf = scores_BV.softmax(-1).cumsum(-1, dtype=torch.float64)
    total = cdf[:, -1:].contiguous()
    token = torch.searchsorted(cdf, uniform_B[:, None] * total, right=True)
    last_possible = torch.searchsorted(cdf, total)
    return torch.minimum(token, last_possible)[:, 0]
