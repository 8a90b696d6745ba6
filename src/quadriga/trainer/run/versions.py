"""Compares the weight version of every response with that of the actor."""

from __future__ import annotations

from collections.abc import Callable

from quadriga.errors import RolloutOutputError
from quadriga.protocol import DataProto, fields
from quadriga.workers.generation import GeneratingGroup


class VersionedRollout:
    """The rollout of a run: what it generates comes from the weights that the actor has.

    Args:
        rollout: the worker group that generates.
        actor_version: returns the version of the actor's weights.
    """

    def __init__(self, rollout: GeneratingGroup, actor_version: Callable[[], int]) -> None:
        self._rollout = rollout
        self._actor_version = actor_version

    @property
    def world_size(self) -> int:
        """The number of ranks of the rollout."""
        return self._rollout.world_size

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Call the method of the group, and compare versions.

        Raises:
            RolloutOutputError: see `check_weight_versions`.
        """
        generated = self._rollout.generate_sequences(prompts)
        check_weight_versions(generated, self._actor_version())
        return generated


def check_weight_versions(batch: DataProto, expected: int) -> None:
    """Check that the weights of one version sampled every row.

    Args:
        batch: rows with the field `weight_version`.
        expected: the version of the actor's weights.

    Raises:
        RolloutOutputError: a row has another version. Attributes: `row` (the first one), `version`.
    """
    found_B = batch.batch[fields.WEIGHT_VERSION]
    wrong = (found_B != expected).nonzero().flatten().tolist()
    if not wrong:
        return
    versions = sorted(set(found_B[wrong].tolist()))
    raise RolloutOutputError(
        f"{len(wrong)} of {len(found_B)} responses, row {wrong[0]} first, were sampled by weights "
        f"of version {', '.join(map(str, versions))}, but the actor has version {expected}. No "
        "training is done on them; the last weight sync did not reach every rank of the rollout, "
        "or another program updates its engine",
        fault="weight version",
        row=wrong[0],
        version=versions[0],
    )
