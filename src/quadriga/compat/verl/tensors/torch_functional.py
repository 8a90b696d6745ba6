"""Tensor functions that worker code imports from verl, computed by Quadriga's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quadriga.algorithms import masked
from quadriga.models.log_probs import log_prob

masked_var = masked.masked_var
masked_whiten = masked.masked_whiten


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Return the sum of the selected values over `axis`; None: over all positions."""
    return masked.masked_sum(values, mask, axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Return the mean of the selected values over `axis`; 0 where the mask selects nothing."""
    return masked.masked_mean(values, mask, axis)


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """Return `x` between two tensors that broadcast to it."""
    return x.clamp(min=tensor_min, max=tensor_max)


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Return log softmax(logits)[labels]; [..., V] and [...] give [...].

    `inplace_backward` is ignored: the backward pass never writes into the logits.
    """
    return log_prob.log_probs_from_logits(logits, labels)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Return the entropy of softmax(logits) in nats; [..., V] gives [...]."""
    return log_prob.entropy_from_logits(logits)


def get_response_mask(
    response_id: Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Return 1 for each token up to the first end token, and for that token; [B, R]."""
    ends = torch.as_tensor(eos_token, device=response_id.device).view(-1)
    is_end_BR = torch.isin(response_id, ends).int()
    # Ends to the left of each position: 0 0 1 0 1 → 0 0 0 1 1, so the mask is 1 1 1 0 0.
    before_BR = is_end_BR.cumsum(1) - is_end_BR
    return (before_BR == 0).to(dtype)


def pad_sequence_to_length(
    tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False
) -> Tensor:
    """Return the rows with at least `max_seq_len` columns, filled with `pad_token_id`."""
    missing = max(0, max_seq_len - tensors.shape[-1])
    return torch.nn.functional.pad(
        tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id
    )


def pad_2d_list_to_length(
    response: Sequence[Sequence[float]], pad_token_id: float, max_length: int | None = None
) -> Tensor:
    """Return lists of numbers as one tensor, filled on the right to the longest of them, or to
    `max_length` if that is longer."""
    length = max([max_length or 0, *map(len, response)])
    return torch.tensor([[*row, *[pad_token_id] * (length - len(row))] for row in response])
