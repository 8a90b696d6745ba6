"""Whether a rollout engine holds what the training engine has: by digests, else by the probe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from quadriga.rollout.abilities import RolloutAbilities
from quadriga.rollout.base import ReportsReceipts
from quadriga.weight_sync.adapters import held_of_part
from quadriga.weight_sync.digests import compare_digests
from quadriga.weight_sync.probe import ScoreProbe


class WeightTarget(Protocol):
    """The part of a `RolloutEngine` that receives weights."""

    @property
    def abilities(self) -> RolloutAbilities:
        """What the engine can do."""
        ...

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights, one tensor at a time."""
        ...

    def score(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the log-probability of each token, given the tokens before it."""
        ...

    def weights_digest(self) -> dict[str, int]:
        """Return the digest of every weight, by checkpoint name."""
        ...

    def weight_dtypes(self) -> Mapping[str, torch.dtype]:
        """Return the dtype of every weight, by checkpoint name."""
        ...


@runtime_checkable
class WaitsForSync(Protocol):
    """A target that generates nothing between the start of a sync and its comparison.

    So an engine with the weights of a sync that broke off, or that was refused, is not used.
    """

    def begin_sync(self, version: int) -> None: ...

    def end_sync(self) -> None: ...


class VerifiedTarget:
    """Updates a rollout engine, and compares it with the training engine after each sync.

    Args:
        target: the rollout engine.
    """

    def __init__(self, target: WeightTarget) -> None:
        self._target = target
        self._probe = None if target.abilities.exposes_weights else ScoreProbe(target)

    def begin(self, version: int) -> None:
        """Start a sync: from here on to the comparison the target generates nothing."""
        if isinstance(self._target, WaitsForSync):
            self._target.begin_sync(version)

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy new weights. See `ScoreProbe.update_weights` for what it raises."""
        if self._probe is None:
            self._target.update_weights(stream, version)
        else:
            self._probe.update_weights(stream, version)

    def compare(self, sent: Mapping[str, int], scores: Tensor | None, version: int) -> None:
        """Compare what the engine holds with what the training engine has, and end the sync.

        Args:
            sent: the digest of each weight of the training engine.
            scores: those of the training engine for the probe tokens; None if the rollout engine
                exposes its weights.

        Raises:
            WorkerError: weights differ. Attributes: `tensor` and `tensors` where they are known,
                `version`.
        """
        if self._probe is None:
            held = held_of_part(sent, self._target.weights_digest())
            compare_digests(sent, held, version)
        else:
            if isinstance(self._target, ReportsReceipts):
                compare_digests(sent, self._target.received_digests(), version)
            assert scores is not None, "the needs of the engine ask for scores"
            self._probe.compare(scores, version)
        if isinstance(self._target, WaitsForSync):
            self._target.end_sync()
