"""What a rollout engine is: prompts in, sampled responses with their log-probabilities out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from quadriga.errors import ConfigError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn, the same for every engine.

    `temperature` 0 is greedy; `top_k` -1 is all; `top_p` 1 is all. A response ends with any of
    `eos_token_ids`, or after `max_new_tokens`. Raises `ConfigError` for a value out of range.
    """

    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1

    def __post_init__(self) -> None:
        problems = {
            "max_new_tokens must be at least 1": self.max_new_tokens < 1,
            "temperature must be 0 (greedy) or above": not self.temperature >= 0,
            "top_p must be above 0 and at most 1": not 0 < self.top_p <= 1,
            "top_k must be -1 (all) or at least 1": self.top_k != -1 and self.top_k < 1,
        }
        for problem, found in problems.items():
            if found:
                raise ConfigError(f"sampling: {problem}; got {self}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class RolloutOutput:
    """Responses, right-padded to R = `max_new_tokens`.

    `response_ids` [B, R] int64; `response_mask` [B, R] int64, 1 up to and including the end token;
    `rollout_log_probs` [B, R] float32, nats, 0 outside the mask: of the distribution at the
    sampling temperature (1 when greedy) *before* top-k and top-p, which is what training computes;
    `finish_reason` [B]: "stop" (end token) or "length".
    """

    response_ids: Tensor
    response_mask: Tensor
    rollout_log_probs: Tensor
    finish_reason: tuple[FinishReason, ...]


class RolloutEngine(Protocol):
    """Holds the policy's weights in a layout made for generation."""

    @property
    def version(self) -> int:
        """The version given with the last weights; -1 for those of the model folder."""
        ...

    def generate(
        self,
        prompt_ids: Tensor,
        attention_mask: Tensor,
        sampling: SamplingParams,
        sample_seeds: Tensor,
    ) -> RolloutOutput:
        """Sample one response a row. `prompt_ids`, `attention_mask` [B, P] left-padded;
        `sample_seeds` [B] int64.

        What a row draws depends on its prompt, its seed and the weights, not on its batch.
        """
        ...

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take new weights, one tensor at a time."""
        ...

    def weights_digest(self) -> dict[str, int]:
        """Digest of every weight held, by checkpoint name."""
        ...

    def weight_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype each weight is held in, by checkpoint name."""
        ...

    def release(self) -> None:
        """Give device memory back; weights are kept in host memory."""
        ...

    def resume(self) -> None:
        """Undo `release`."""
        ...
