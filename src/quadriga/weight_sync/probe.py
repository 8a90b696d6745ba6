"""Compare a rollout engine that does not expose its weights with the training engine.

Three comparisons replace the digests of what the engine holds:

    receipts   digests of what the engine's own processes were sent, if it reports them
               (`ReportsReceipts`): a weight that was lost, stale or changed on the way to them
    effects    in the first sync each weight is sent twice, changed and then right, and both must
               change the engine's log-probabilities: a weight that the engine does not take over.
               A tied name, which an engine may ignore, is sent once
    scores     after each sync, trainer and engine compute the log-probabilities of the same random
               tokens: a weight in a wrong place or with wrong values

Engines with the same weights agree up to rounding. In float32 no score may differ by more than
`EXACT_BOUND`. With fewer bits the bound of the mean is `NOISE_FACTOR` times the mean before the
first sync, when both usually hold the weights of the model folder, and later that of the first
sync; it is at most `ROUNDED_BOUND`. A change of a weight that is smaller than the rounding of the
engine's scores is not found by its scores alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from quadriga.engines.base import LOG_PROBS, Batch, Outputs
from quadriga.errors import WorkerError
from quadriga.protocol import fields
from quadriga.rollout.abilities import RolloutAbilities

PROBE_ROWS, PROBE_TOKENS = 8, 32
EXACT_BOUND = 1e-3
"""Nats that no log-probability may differ by if the rollout engine computes in float32."""
ROUNDED_BOUND = 0.1
"""Nats that log-probabilities may differ by on average if it computes with fewer bits."""
NOISE_FACTOR = 2.0
"""How much more log-probabilities may differ on average than after the first sync."""
LEAST_NOISE = 1e-3
"""Nats: a mean difference in the first sync below this one counts as this one."""
_JITTER_FACTOR = 4.0
_LEAST_CHANGE = 2.0**-4
"""Of the largest number of a weight: what a change is at least, above the rounding of 8 bits."""


class Scorer(Protocol):
    """The part of a `RolloutEngine` that the probe asks."""

    @property
    def abilities(self) -> RolloutAbilities: ...

    def score(self, ids: Tensor, attention_mask: Tensor) -> Tensor: ...

    def weight_dtypes(self) -> Mapping[str, torch.dtype]: ...

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None: ...


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


class ScoreProbe:
    """The comparisons of one rollout engine over all syncs of a run.

    Args:
        target: the rollout engine.
    """

    def __init__(self, target: Scorer) -> None:
        self._target = target
        self._proven = False  # a sync has proven effects, and has ended with equal scores
        self._version: int | None = None  # of the sync that proves effects
        self._noise: float | None = None
        # Of the ids of the first sync: with the weights before it, and with those sent so far.
        self._before: Tensor | None = None
        self._scores: Tensor | None = None

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Update the engine. In the first sync, prove that each weight has an effect.

        A name that is tied to the one before it, with the same tensor, is not proven again.

        Raises:
            WorkerError: an update of a weight changes no score. Attributes: `tensor`, `version`.
        """
        if self._proven:
            self._target.update_weights(stream, version)
            return
        if version != self._version:  # the first sync, or the one before has failed
            self._version = version
            self._before = self._scores = self._noise = None
        try:
            self._update_and_prove(stream, version)
        except BaseException:
            self._version = None
            raise

    def _update_and_prove(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        previous: Tensor | None = None
        for name, tensor in stream:
            # The tensor of a tied name, which an engine may ignore, is proven under its first name.
            if tensor is previous or not tensor.numel():
                self._target.update_weights([(name, tensor)], version)
                self._scores = self._score(probe_ids(self._target.abilities, version))
            else:
                self._prove(name, tensor, version)
            previous = tensor

    def _prove(self, name: str, tensor: Tensor, version: int) -> None:
        ids = probe_ids(self._target.abilities, version)
        if self._before is None or self._scores is None:
            self._before = self._scores = self._score(ids)
        before = self._scores
        jitter = float((self._score(ids) - before).abs().max())
        # Not a multiple of the weight: a norm behind it would hide the factor.
        values = tensor.float()
        spread = values.std(correction=0).clamp(min=0.1)
        spread = torch.maximum(spread, values.abs().max() * _LEAST_CHANGE)
        changed = (values + spread * _pattern(values)).to(tensor.dtype)
        self._target.update_weights([(name, changed)], version)
        between = self._score(ids)
        self._target.update_weights([(name, tensor)], version)
        self._scores = self._score(ids)
        least = min(
            float((between - before).abs().max()), float((self._scores - between).abs().max())
        )
        if not least > _JITTER_FACTOR * jitter:
            raise WorkerError(
                f"weight sync to version {version}: an update of weight {name!r} changes no "
                f"log-probability of {ids.numel()} probe tokens, so the rollout engine does not "
                "take it over, or computes without it. The run stops, because its samples would "
                "come from other weights than those that are trained; use another engine "
                "(rollout.name)",
                tensor=name,
                tensors=(name,),
                version=version,
            )

    def _score(self, ids: Tensor) -> Tensor:
        return self._target.score(ids, torch.ones_like(ids))[:, 1:]

    def compare(self, trained: Tensor, version: int) -> float:
        """Compare the scores of the rollout engine with those of the training engine.

        Args:
            trained: `trained_scores` of `probe_ids` of the version.

        Returns:
            The largest difference, in nats.

        Raises:
            WorkerError: they differ by more than rounding. Attributes: `version`, `difference`.
        """
        ids = probe_ids(self._target.abilities, version)
        difference = (self._score(ids) - trained).abs()
        exact = all(dtype.itemsize >= 4 for dtype in self._target.weight_dtypes().values())
        found = float(difference.max() if exact else difference.mean())
        if self._noise is None and self._before is not None:
            self._noise = max(float((self._before - trained).abs().mean()), LEAST_NOISE)
        bound = EXACT_BOUND if exact else self._rounded_bound()
        if not found <= bound:  # NaN is no agreement
            kind = "at most" if exact else "on average"
            raise WorkerError(
                f"weight sync to version {version}: the log-probabilities of {ids.numel()} probe "
                f"tokens differ by {found:.3g} nats between trainer and rollout, expected {kind} "
                f"{bound:.3g}. The run stops, because its samples would come from other weights "
                "than those that are trained",
                version=version,
                difference=found,
            )
        if not self._proven:
            self._noise = max(found, LEAST_NOISE)
            self._proven = True
        return float(difference.max())

    def _rounded_bound(self) -> float:
        if self._noise is None:
            return ROUNDED_BOUND
        return min(ROUNDED_BOUND, NOISE_FACTOR * self._noise)


def _pattern(tensor: Tensor) -> Tensor:
    """Return ones and minus ones in the shape of a tensor, in an order that repeats nowhere."""
    generator = torch.Generator().manual_seed(tensor.numel())
    signs = torch.randint(2, tensor.shape, generator=generator) * 2 - 1
    return signs.to(tensor.device, tensor.dtype)
