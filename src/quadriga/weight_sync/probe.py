"""Compare a rollout engine that does not expose its weights with the training engine, by scores.

Both compute the log-probabilities of the same random tokens. Engines with the same weights agree up
to rounding; a weight that is missing, stale or in another order changes them. A change of a weight
that is smaller than the rounding of the engines is not found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from quadriga.engines.base import LOG_PROBS, Batch, Outputs
from quadriga.errors import WorkerError
from quadriga.protocol import fields
from quadriga.rollout.abilities import RolloutAbilities

PROBE_ROWS, PROBE_TOKENS = 4, 24
EXACT_BOUND = 1e-3
"""Nats that no log-probability may differ by if the rollout engine computes in float32."""
ROUNDED_BOUND = 0.1
"""Nats that log-probabilities may differ by on average if it computes with fewer bits."""


class Scorer(Protocol):
    """The part of a `RolloutEngine` that the probe asks."""

    @property
    def abilities(self) -> RolloutAbilities: ...

    def score(self, ids: Tensor, attention_mask: Tensor) -> Tensor: ...

    def weight_dtypes(self) -> Mapping[str, torch.dtype]: ...


@runtime_checkable
class ScoredSource(Protocol):
    """The part of a `TrainEngine` that the probe asks."""

    def forward(self, batch: Batch, *, temperature: float = 1.0) -> Outputs: ...


def probe_ids(abilities: RolloutAbilities, version: int) -> Tensor:
    """Return [`PROBE_ROWS`, T] int64: random tokens, others for each version, T ≤ the window."""
    columns = min(PROBE_TOKENS, abilities.window or PROBE_TOKENS)
    generator = torch.Generator().manual_seed(version)
    shape = (PROBE_ROWS, max(columns, 2))
    return torch.randint(abilities.vocabulary, shape, generator=generator)


def trained_scores(source: ScoredSource, ids: Tensor) -> Tensor:
    """Return the training engine's log-probability of each token but the first, [B, T - 1].

    Waits for: the other ranks of the engine.
    """
    ones = torch.ones_like(ids)
    batch = {
        fields.INPUT_IDS: ids,
        fields.ATTENTION_MASK: ones,
        fields.RESPONSE_MASK: ones[:, 1:],
    }
    return source.forward(batch, temperature=1.0)[LOG_PROBS]


def compare_scores(trained: Tensor, target: Scorer, ids: Tensor, version: int) -> float:
    """Compare the scores of the rollout engine with those of the training engine.

    Args:
        trained: `trained_scores` of `ids`.

    Returns:
        The largest difference, in nats.

    Raises:
        WorkerError: they differ by more than rounding. Attributes: `version`, `difference`.
    """
    difference = (target.score(ids, torch.ones_like(ids))[:, 1:] - trained).abs()
    exact = all(dtype.itemsize >= 4 for dtype in target.weight_dtypes().values())
    found = float(difference.max() if exact else difference.mean())
    bound = EXACT_BOUND if exact else ROUNDED_BOUND
    if not found <= bound:  # NaN is no agreement
        kind = "at most" if exact else "on average"
        raise WorkerError(
            f"weight sync to version {version}: the log-probabilities of {ids.numel()} probe "
            f"tokens differ by {found:.3g} nats between trainer and rollout, expected {kind} "
            f"{bound:g}. The run stops, because its samples would come from other weights than "
            "those that are trained",
            version=version,
            difference=found,
        )
    return float(difference.max())
