"""Responses of rows of different length as one `RolloutOutput`, for engines that return lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quadriga.rollout.base import FinishReason, RolloutOutput
from quadriga.rollout.params import SamplingParams


@dataclass(frozen=True)
class Response:
    """One response: its tokens, their log-probabilities in nats, and why it ended."""

    tokens: Sequence[int]
    log_probs: Sequence[float]
    reason: FinishReason


def padded_output(
    responses: Sequence[Response], sampling: SamplingParams, version: int
) -> RolloutOutput:
    """Return the responses, padded to `max_new_tokens`, as sampled by weights of one version.

    The log-probabilities are those of the responses, but 0 for "sampled" ones of greedy responses:
    the most likely token is drawn with probability 1.
    """
    count, width = len(responses), sampling.max_new_tokens
    ids = torch.full((count, width), sampling.pad_token_id, dtype=torch.int64)
    mask = torch.zeros(count, width, dtype=torch.int64)
    log_probs = torch.zeros(count, width)
    certain = sampling.greedy and sampling.log_probs == "sampled"
    for row, response in enumerate(responses):
        length = len(response.tokens)
        ids[row, :length] = torch.tensor(response.tokens, dtype=torch.int64)
        mask[row, :length] = 1
        if not certain:
            log_probs[row, :length] = torch.tensor(response.log_probs)
    reasons = tuple(response.reason for response in responses)
    versions = torch.full((count,), version, dtype=torch.int64)
    return RolloutOutput(ids, mask, log_probs, reasons, versions)
