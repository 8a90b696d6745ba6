"""The protocol that every rollout engine implements, its inputs and outputs, and weight digests.

Shapes: B rows, P prompt columns, R = `max_new_tokens` response columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from quadriga.errors import ConfigError

FinishReason = Literal["stop", "length"]
"""Why a response ended: with an end token, or at `max_new_tokens`."""

# The integer type with as many bytes as an element of the tensor.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DIGEST_CHUNK = 1 << 22


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled, the same for every engine.

    A response ends with any of `eos_token_ids`, or after `max_new_tokens` tokens.

    Attributes:
        temperature: 0 is greedy.
        top_p: 1 allows the whole vocabulary.
        top_k: -1 allows the whole vocabulary.

    Raises:
        ConfigError: a value is out of range.
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
        """Whether the most likely token is taken instead of a random one."""
        return self.temperature == 0


@dataclass(frozen=True)
class RolloutOutput:
    """Responses, right-padded to R columns.

    Attributes:
        response_ids: [B, R] int64.
        response_mask: [B, R] int64, 1 up to and including the end token.
        rollout_log_probs: [B, R] float32, nats, 0 outside the mask. They are of the distribution at
            the sampling temperature (1 if greedy) *before* top-k and top-p, which is the one that
            training computes.
        finish_reason: B reasons.
    """

    response_ids: Tensor
    response_mask: Tensor
    rollout_log_probs: Tensor
    finish_reason: tuple[FinishReason, ...]


class RolloutEngine(Protocol):
    """A copy of the policy that generates. It is not sharded like the training engine's copy."""

    @property
    def version(self) -> int:
        """The version of the weights, as given to `update_weights`; -1 for the folder's weights."""
        ...

    def generate(
        self,
        prompt_ids: Tensor,
        attention_mask: Tensor,
        sampling: SamplingParams,
        sample_seeds: Tensor,
    ) -> RolloutOutput:
        """Sample one response for each row.

        The response of a row depends on its prompt, its seed and the weights, not on the batch.

        Args:
            prompt_ids, attention_mask: [B, P] int64, left-padded.
            sample_seeds: [B] int64.

        Raises:
            ShapeError: the three shapes disagree.
        """
        ...

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights from (checkpoint name, full tensor) pairs, one tensor at a time.

        Raises:
            ModelError: the model has no weight of that name and shape.
        """
        ...

    def weights_digest(self) -> dict[str, int]:
        """Return the `tensor_digest` of every weight, by checkpoint name."""
        ...

    def weight_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype of every weight, by checkpoint name."""
        ...

    def release(self) -> None:
        """Free the engine's device memory. The weights stay in host memory."""
        ...

    def resume(self) -> None:
        """Move the weights back to the device."""
        ...


def tensor_digest(tensor: Tensor) -> int:
    """Return a cheap digest of a tensor's bits, computed on the tensor's device.

    Equal dtypes and bits give equal digests. One changed element gives another digest, and so do
    two exchanged elements of up to 4 bytes. The digest detects mistakes, not deliberate forgery.
    """
    # Σ bits[i] · (2i + 1) modulo 2^64, plus the number of elements. For the int8 tensor 3 5 7:
    #
    #   element      3   5   7         5   3   7 (exchanged)     3   5   7   0 (longer)
    #   factor       1   3   5         1   3   5                 1   3   5   7
    #   sum + n      3 + 15 + 35 + 3   5 + 9 + 35 + 3            3 + 15 + 35 + 0 + 4
    #              = 56              = 52                      = 57
    #
    # An odd factor is invertible modulo 2^64, so changing one element always changes the sum.
    flat = tensor.detach().contiguous().view(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _DIGEST_CHUNK):
        chunk = flat[start : start + _DIGEST_CHUNK]
        bits = chunk.view(_BITS[chunk.element_size()]).to(torch.int64)
        index = torch.arange(start, start + len(chunk), device=flat.device)
        total += (bits * (2 * index + 1)).sum()
    return int(total) + flat.numel()
