"""The protocol that every training engine implements, and the types in it.

Shapes: B rows, P prompt columns, R response columns.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from quadriga.checkpoint.files import SavedFile
from quadriga.checkpoint.shards import Block
from quadriga.models.images import MultiModalRows

HeadKind = Literal["lm", "value", "score"]
"""What the model computes for a token: logits over the vocabulary, or one value. The head of a
value model has a bias; that of a reward model ("score") has none, as in a sequence classifier."""

EntropyUse = Literal["unused", "value", "gradient"]
"""What an update needs of the entropies: nothing, their values alone, or their gradients too,
because its loss depends on them."""

Batch = Mapping[str, Tensor]
"""Tensors with the same first dimension. Required: `input_ids`, `attention_mask` [B, P + R]
(left-padded prompts, then right-padded responses) and `response_mask` [B, R]. A loss may read any
other field."""

Outputs = dict[str, Tensor]
"""`LOG_PROBS` [B, R] (and `ENTROPY`, `FULL_KL` [B, R] if requested), or `VALUES` [B, R]; 0 outside
`response_mask`. Entry t belongs to the state in which response token t is chosen."""

# The names of `Outputs`, each with its unit.
LOG_PROBS = "log_probs"  # nats, log-probability of the response token
ENTROPY = "entropy"  # nats, of the distribution over the vocabulary
FULL_KL = "full_kl"  # nats, KL(policy ‖ reference) over the vocabulary
VALUES = "values"  # reward, expected return

WeightPart = Literal["merged", "unmerged", "adapters"]
"""What a weight sync sends of a model: see `TrainEngine.shard_stream`."""

OwnWeights = Generator[tuple[str, Tensor | Block], None, None]
"""What a rank has of each weight, by checkpoint name."""

SKIPPED_STEPS = "skipped_steps"
"""Metric of `train_step`: the optimizer steps that were skipped so far."""

LossFn = Callable[[Outputs, Batch], tuple[Tensor, Mapping[str, Tensor | float]]]
"""(outputs, micro-batch) -> (loss, metrics). Both are this micro-batch's *share* of the value for
the mini-batch: sums over its rows, divided by counts of the whole mini-batch over all ranks
(`TrainEngine.global_counts`). The engine sums the shares over micro-batches and ranks, for the
gradient of the loss and for the metrics. The sum is exact however the rows are split.
Rows whose `response_mask` is all 0 have no outputs, so the function does not receive them."""

# Why shares: three rows with 2, 1 and 5 response tokens, and the mean loss of a token, whose
# denominator is 2 + 1 + 5 = 8. With the micro-batches {0, 1} and {2}:
#
#                        tokens   share of the loss      a token's weight   weight by mean of means
#   micro-batch {0, 1}      3     (l0 + l1 + l2) / 8           1/8                  1/6
#   micro-batch {2}         5     (l3 + … + l7) / 8            1/8                  1/10
#
# The shares add up to the mean over 8 tokens. Averaging the means of the two micro-batches would
# give the tokens of short micro-batches a larger weight, and the split would change the gradient.


class TrainEngine(Protocol):
    """A model and its optimizer. All ranks of the group must call the same method together."""

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps since the start of the run, those before a resume included; 0 for a
        frozen model."""
        ...

    def forward(
        self,
        batch: Batch,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        micro_batch_size: int | None = None,
        images: MultiModalRows | None = None,
    ) -> Outputs:
        """Compute outputs without gradients: float32, on the CPU, rows in the batch's order.

        Args:
            temperature: the logits are divided by it.
            entropy: also compute `entropy`.
            micro_batch_size: rows of a micro-batch. None: as the engine's settings say.
            images: of the rows, for a model that takes images; None: they are text.

        Raises:
            FieldError: the batch lacks a required field, or `images` do not fit it.
        """
        ...

    def train_step(
        self,
        mini_batch: Batch,
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        reference: TrainEngine | None = None,
        micro_batch_size: int | None = None,
        images: MultiModalRows | None = None,
    ) -> dict[str, float]:
        """Make one optimizer step.

        Args:
            loss_fn: see `LossFn`.
            reference: an engine of the same kind on the same ranks, whose model has the same
                vocabulary. The outputs then contain `full_kl`: KL(policy ‖ reference) of each
                token, over the vocabulary and at `temperature`, with its gradient.
            images: as in `forward`.

        Returns:
            The metrics of the loss function and `loss`, summed over micro-batches and ranks;
            `grad_norm` (before clipping), `lr`, `skipped_steps` and `micro_batches`.

        Raises:
            ConfigError: the engine has no optimizer, or `reference` is of another kind.
            FieldError: the batch lacks a required field.
        """
        ...

    def micro_batches(
        self,
        batch: Batch,
        *,
        micro_batch_size: int | None = None,
        images: MultiModalRows | None = None,
    ) -> list[Tensor | None]:
        """Return the row indices of each micro-batch that `train_step` makes of a batch.

        Rows whose `response_mask` is all 0 are in none. None: a micro-batch without rows of this
        rank. All ranks have the same number of micro-batches. Waits for: the other ranks, which
        must call this together.
        """
        ...

    def global_counts(self, *counts: float | Tensor) -> list[float]:
        """Return the sum of each count over ranks. All of them are summed in one collective."""
        ...

    def state_stream(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, full tensor) of every weight.

        A tied name follows its weight, with the same tensor. All ranks must exhaust the iterator,
        because gathering a tensor is a collective.
        """
        ...

    def shard_stream(self, part: WeightPart = "merged") -> OwnWeights:
        """Yield `state_stream` with what this rank has of each weight, so that no rank gathers it:
        a `DTensor`, a block, which may be empty, or the whole tensor.

        All ranks must exhaust it, and close it if they cannot: the engine may have loaded its
        weights for it. Adapters are yielded for a rollout engine that holds them beside its
        weights. B is multiplied by the scaling:

            part         what is yielded
            merged       W + B A of every layer
            unmerged     W of every layer, then A and B
            adapters     A and B

        Raises:
            ConfigError: the model has no adapters to yield.
        """
        ...

    def save(self, folder: str | Path, step: int = 0) -> list[SavedFile]:
        """Write this rank's parameter shards, optimizer state and random state.

        Args:
            step: the training step, which each file holds.

        Returns:
            The files of this rank, named relative to `folder`.
        """
        ...

    def load(self, folder: str | Path, step: int | None = None) -> None:
        """Read what `save` wrote, on any number of ranks.

        Raises:
            CheckpointError: files are missing, of another model, or of another step than `step`
                (None: than each other).
        """
        ...

    def save_hf(self, folder: str | Path) -> None:
        """Write a Hugging Face folder. Rank 0 writes; all ranks must call this."""
        ...

    def offload(self) -> None:
        """Move parameters and optimizer state to host memory, and free their device memory.

        Methods that need them reload them for the call. Does nothing on a CPU.
        """
        ...

    def reload(self) -> None:
        """Move parameters and optimizer state back to the device.

        A state that the settings keep in host memory between calls stays there.
        """
        ...
