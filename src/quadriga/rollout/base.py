"""The protocol that every rollout engine implements, its inputs and outputs, and weight digests.

Shapes: B rows, P prompt columns, R = `max_new_tokens` response columns, T columns of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from quadriga.models.vision.rows import MultiModalRows
from quadriga.parallel.layouts import Box
from quadriga.rollout.abilities import RolloutAbilities
from quadriga.rollout.params import LogProbKind as LogProbKind
from quadriga.rollout.params import SamplingParams as SamplingParams

FinishReason = Literal["stop", "length"]
"""Why a response ended: with an end token or a stop string, or at `max_new_tokens`."""

# The integer type with as many bytes as an element of the tensor.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DIGEST_CHUNK = 1 << 22


@dataclass(frozen=True)
class RolloutOutput:
    """Responses in the order of the request, right-padded to R columns.

    Attributes:
        response_ids: [B, R] int64. Padding is `pad_token_id`.
        response_mask: [B, R] int64, 1 up to and including the token that ends the response.
        rollout_log_probs: [B, R] float32, nats, 0 outside the mask, of the distribution that
            `SamplingParams.log_probs` names.
        finish_reason: B reasons.
        weight_versions: [B] int64, the version of the weights that sampled each row. One version
            sampled all tokens of a row.
    """

    response_ids: Tensor
    response_mask: Tensor
    rollout_log_probs: Tensor
    finish_reason: tuple[FinishReason, ...]
    weight_versions: Tensor


@runtime_checkable
class RolloutEngine(Protocol):
    """A copy of the policy that generates. It is not sharded like the training engine's copy.

    `quadriga.testing.check_rollout` checks an engine against this protocol.
    """

    @property
    def name(self) -> str:
        """The name of the engine for error messages, as in `rollout.name`."""
        ...

    @property
    def abilities(self) -> RolloutAbilities:
        """What this engine can do with the model that it holds."""
        ...

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
        """Sample one response for each row, in the order of the rows.

        The n responses of one prompt are n rows with seeds of their own. The response of a row
        depends on its prompt, its seed and the weights, not on the batch, as far as `abilities`
        say so. The token ids of the prompt are used as they are. An empty batch has an empty
        result.

        Args:
            prompt_ids, attention_mask: [B, P] int64, left-padded.
            sample_seeds: [B] int64.

        Raises:
            ShapeError: the three shapes disagree.
            RolloutInputError: a prompt is empty or too long, or has an id outside the vocabulary.
            RolloutAbilityError: the engine cannot do what `sampling` asks.
            RolloutError: the engine is released, closed or has failed.
        """
        ...

    def score(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the log-probability at temperature 1 of each token, given the tokens before it.

        Args:
            ids, attention_mask: [B, T] int64. The ones of a row of the mask are contiguous, so
                sequences may be padded on the left, on the right or on both sides.

        Returns:
            [B, T] float32, nats; 0 at the first token of each row and at padding.

        Raises:
            ShapeError, RolloutInputError, RolloutError: as `generate`.
        """
        ...

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights from (checkpoint name, full tensor) pairs, one tensor at a time.

        The stream may hold a part of the weights; the others stay as they are. Nothing that was
        computed with the old weights (a prefix cache) is used afterwards. The method may also be
        called between `release` and `resume`.

        Raises:
            ModelError: the model has no weight of that name and shape.
        """
        ...

    def weights_digest(self) -> dict[str, int]:
        """Return the `tensor_digest` of every weight, by checkpoint name.

        Raises:
            RolloutAbilityError: `abilities.exposes_weights` is False. Compare `score` of probe
                prompts with the training engine instead.
        """
        ...

    def weight_dtypes(self) -> Mapping[str, torch.dtype]:
        """Return the dtype in which the engine holds each weight, by checkpoint name.

        A name that is missing is a weight that the engine takes in the dtype in which it is sent.
        """
        ...

    def release(self) -> None:
        """Free the engine's device memory. `resume` gives the same weights and version back, unless
        the engine lacks them (`DropsWeights`).

        Between `release` and `resume`, `generate` and `score` raise `RolloutError`.
        """
        ...

    def resume(self) -> None:
        """Make a released engine ready to generate again. Does nothing if it is not released."""
        ...

    def close(self) -> None:
        """End the engine with its processes and files. A second call does nothing.

        Every other method but `name`, `abilities` and `version` then raises `RolloutError`.
        """
        ...


@runtime_checkable
class GeneratesFromImages(Protocol):
    """A rollout engine that computes images beside text."""

    def generate_from_images(
        self,
        prompt_ids: Tensor,
        attention_mask: Tensor,
        sampling: SamplingParams,
        sample_seeds: Tensor,
        images: MultiModalRows,
    ) -> RolloutOutput:
        """Sample as `RolloutEngine.generate` from prompts with images.

        Args:
            images: of the rows, with `position_ids` [B, 3, P].

        Raises:
            FieldError: a row has another number of image tokens than its images.
        """
        ...


@runtime_checkable
class SharesWeights(Protocol):
    """A rollout engine that can use the tensors of a training engine as its weights."""

    def share_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Use the given tensors themselves as weights where they fit, and copy the others.

        A tensor fits if shape, dtype and device are those of the engine's weight. Its owner may
        change it in place later, as an optimizer step does. `generate` and `score` then raise
        `RolloutError` until the next `share_weights` or `update_weights`, because the engine's
        version would be wrong.

        Returns:
            The bytes of the weights that are shared now.

        Raises:
            ModelError: as `RolloutEngine.update_weights`.
        """
        ...


@runtime_checkable
class HoldsShards(Protocol):
    """A rollout engine of which several ranks hold one copy of the weights together."""

    def weight_boxes(self) -> Mapping[str, Box]:
        """Return the box of each weight that this rank holds, by checkpoint name.

        A weight that is missing is whole on every rank. Empty if this rank holds a copy alone.
        """
        ...

    def update_shards(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights as `RolloutEngine.update_weights`, from (checkpoint name, tensor) pairs
        with the values of `weight_boxes`.

        Raises:
            ModelError: the model has no weight of that name, or its box has another shape.
        """
        ...


@runtime_checkable
class DropsWeights(Protocol):
    """A rollout engine whose `release` can free the weights without a copy of them."""

    def lacks_weights(self) -> bool:
        """Return whether weights must be sent before the engine can generate.

        After `release` the engine then has none. Until `update_weights` has sent all of them,
        `generate` and `score` raise `RolloutError`. `update_weights` may be called before `resume`.
        """
        ...


@runtime_checkable
class ReportsReceipts(Protocol):
    """A rollout engine that tells what it was sent, if it cannot tell what it holds."""

    def received_digests(self) -> Mapping[str, int]:
        """Return the `tensor_digest` of each weight that was accepted, as it was sent last.

        They are computed from the bytes that are sent to the engine's processes. A weight that was
        never sent is missing.
        """
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
