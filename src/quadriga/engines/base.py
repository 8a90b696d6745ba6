"""What a training engine is, whatever runs under it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

Batch = Mapping[str, Tensor]
"""Tensors that share dim 0. Needed: `input_ids`, `attention_mask` [B, P + R] (left-padded prompts,
then right-padded responses) and `response_mask` [B, R]. A loss may read any other field."""

Outputs = dict[str, Tensor]
"""`log_probs` [B, R] (and `entropy`, `full_kl` [B, R] where asked for), or `values` [B, R]; zero
outside `response_mask`. Entry t belongs to the state in which response token t is chosen."""

LossFn = Callable[[Outputs, Batch], tuple[Tensor, Mapping[str, Tensor | float]]]
"""(outputs, micro-batch) -> (loss, metrics). Both are this micro-batch's *share* of the
mini-batch's number: sums over its rows, divided by counts of the whole mini-batch over all ranks
(`TrainEngine.global_count`). Then adding up shares over micro-batches and ranks is exact however
the rows were cut, and that is what the engine does, for the loss's gradient and for metrics.
Rows whose `response_mask` is empty are not shown to it: they have no outputs."""


class TrainEngine(Protocol):
    """Holds a model and its optimizer. Every rank of the group calls the same method together."""

    def forward(
        self,
        batch: Batch,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        micro_batch_size: int | None = None,
    ) -> Outputs:
        """Outputs without gradients, float32, on CPU, rows in the batch's order."""
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
    ) -> dict[str, float]:
        """One optimizer step. Returns the loss function's metrics, and `loss`, summed over
        micro-batches and ranks, with `grad_norm`, `lr`, `skipped_steps`, `micro_batches`.

        With a `reference`, an engine of the same kind on the same ranks that holds a model with
        the same words, outputs have `full_kl`: KL(policy ‖ reference) of each token, over the
        vocabulary and at `temperature`, with its gradient. Raises `ConfigError` for another kind.
        """
        ...

    def global_count(self, count: float | Tensor) -> float:
        """The sum of the ranks' counts."""
        ...

    def state_stream(self) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, full tensor) of every weight. All ranks must run it to its end."""
        ...

    def save(self, folder: str | Path) -> None:
        """Write this rank's shard of weights, optimizer and random state."""
        ...

    def load(self, folder: str | Path) -> None:
        """Read what `save` wrote, on any number of ranks."""
        ...

    def save_hf(self, folder: str | Path) -> None:
        """Write a Hugging Face folder (rank 0 writes, all ranks take part)."""
        ...

    def offload(self) -> None:
        """Move parameters and optimizer state to host memory."""
        ...

    def reload(self) -> None:
        """Move them back."""
        ...
