"""Sample tokens by inverse CDF, with one uniform number for each (sample seed, token position).

The tokens of a row are a function of its own seed and its own logits. They depend neither on the
number of workers nor on the other rows of the batch.

Shapes: B rows, R positions, V vocabulary entries.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quadriga.rollout.abilities import SamplingParams


def _as_int64(value: int) -> int:
    """Return the int64 with the same 64 bits as the unsigned `value`; torch has no uint64 maths."""
    return value - (1 << 64) if value >> 63 else value


# Constants of splitmix64: 2^64 / golden ratio, and the two multipliers of its finalizer.
_GOLDEN = _as_int64(0x9E3779B97F4A7C15)
_MIX_1 = _as_int64(0xBF58476D1CE4E5B9)
_MIX_2 = _as_int64(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift without the sign: `>>` on int64 would fill the upper bits with the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), modulo 2^64."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(seeds_B: Tensor, positions_R: Tensor) -> Tensor:
    """Return [B, R] float64 numbers in [0, 1), functions of seed and token position alone.

    Args:
        seeds_B, positions_R: int64.
    """
    steps = (positions_R + 1) * _GOLDEN
    states = _mix(seeds_B + _GOLDEN)[:, None] + steps
    # A float64 has 53 bits of precision, so the upper 53 of the 64 bits are used.
    return _shift_right(_mix(states), 11).to(torch.float64) * 2.0**-53


def _without_excluded(scores_BV: Tensor, sampling: SamplingParams, position: int) -> Tensor:
    """Set the scores of tokens that must not be sampled at this position to -inf.

    End tokens are among them while the response is shorter than its minimum.
    """
    ends = sampling.end_token_ids if position < sampling.min_new_tokens else ()
    tokens = [t for t in (*sampling.excluded_token_ids, *ends) if t < scores_BV.shape[-1]]
    if not tokens:
        return scores_BV
    index = torch.tensor(tokens, device=scores_BV.device)
    return scores_BV.index_fill(-1, index, -math.inf)


def _filtered(scores_BV: Tensor, sampling: SamplingParams) -> Tensor:
    """Set the scores that top-k, then top-p, then min-p exclude to -inf.

    Top-k keeps scores that equal the k-th largest. Top-p keeps a token if the more likely tokens
    together have less than `top_p`, so the most likely token always stays. Min-p keeps a token with
    at least `min_p` times the probability of the most likely one.
    """
    if 0 < sampling.top_k < scores_BV.shape[-1]:
        kth = scores_BV.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores_BV = scores_BV.masked_fill(scores_BV < kth, -math.inf)
    if sampling.top_p < 1.0:
        # top_p 0.7, one row with the probabilities .15 .5 .05 .3:
        #
        #   sorted           .5    .3    .15   .05
        #   sum before       0     .5    .8    .95
        #   kept            yes    yes   no    no      so .5 and .3 remain
        ordered, order = scores_BV.sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs
        drop = torch.zeros_like(before, dtype=torch.bool).scatter(
            -1, order, before >= sampling.top_p
        )
        scores_BV = scores_BV.masked_fill(drop, -math.inf)
    if sampling.min_p > 0.0:
        # p ≥ min_p · p_max in logarithms; the normalisation is the same on both sides.
        least = scores_BV.amax(-1, keepdim=True) + math.log(sampling.min_p)
        scores_BV = scores_BV.masked_fill(scores_BV < least, -math.inf)
    return scores_BV


def draw(
    logits_BV: Tensor, sampling: SamplingParams, uniform_B: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    """Sample one token for each row.

    Args:
        uniform_B: [B], the numbers of the rows at this position (`uniform`).
        position: index t of the response token.

    Returns:
        [B] int64 tokens, and [B] float32 log-probabilities of the kind `sampling.log_probs`, nats.
    """
    logits = logits_BV.float()
    if sampling.greedy:
        token = _without_excluded(logits, sampling, position).argmax(-1)
        log_prob = torch.zeros_like(logits[:, 0])
        return token, log_prob if sampling.log_probs == "sampled" else _log_prob(logits, token)
    scores = logits / sampling.temperature if sampling.temperature != 1.0 else logits
    allowed = _filtered(_without_excluded(scores, sampling, position), sampling)
    probs = allowed.softmax(-1)
    token = _inverse_cdf(probs, uniform_B)
    wanted = {"policy": scores, "sampled": allowed, "temperature_1": logits}[sampling.log_probs]
    if wanted is allowed:  # the softmax is there already
        return token, probs.gather(-1, token[:, None])[:, 0].log()
    return token, _log_prob(wanted, token)


def _log_prob(scores_BV: Tensor, token_B: Tensor) -> Tensor:
    return scores_BV.gather(-1, token_B[:, None])[:, 0] - scores_BV.logsumexp(-1)


def _inverse_cdf(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Return the first token of each row whose cumulative probability is above the number u."""
    # Three rows, V = 4:
    #
    #            probabilities      cumulative            u      token
    #   row 0   .5  .3  .15  .05    .5  .8  .95  1.0    0.62      1      .5 ≤ .62 < .8
    #   row 1   .5  .3  .15  .05    .5  .8  .95  1.0    0.50      1      .5 is not above .5
    #   row 2    0  .4   0   .6      0  .4  .4   1.0    0.40      3      token 2 has probability 0
    #
    # The sums are in float64: in float32, tokens of a large vocabulary would be lost to rounding.
    # The last sum may still differ from 1, so u is scaled by it. `cumsum` with a dtype would hold
    # the float64 numbers twice, so they are summed in place.
    cdf = probs_BV.double().cumsum_(-1)
    total = cdf[:, -1:].contiguous()
    token = torch.searchsorted(cdf, uniform_B[:, None] * total, right=True)
    # u · total can round up to total; the result is then the last token with probability above 0.
    last_possible = torch.searchsorted(cdf, total)
    return torch.minimum(token, last_possible)[:, 0]
