"""From a pool of ranks to the replicas of a rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from quadriga.config.schema import RolloutEngineConfig, TrainConfig
from quadriga.errors import ConfigError
from quadriga.rollout import rollout_of
from quadriga.single_controller import split_resource_pool
from quadriga.trainer.replicas.replica import ReplicaGroup, Replicas

if TYPE_CHECKING:
    from quadriga.single_controller import Backend, ClassWithInitArgs, ResourcePool, WorkerGroup


def are_replicas(config: TrainConfig, uses: Sequence[str]) -> bool:
    """Return whether the ranks of a pool with these uses are replicas of the rollout."""
    return config.actor_rollout_ref.rollout.replicas.enable and "rollout" in uses


def start_replicas(
    settings: RolloutEngineConfig,
    backend: Backend,
    pool: ResourcePool,
    members: Mapping[str, ClassWithInitArgs],
    started: list[WorkerGroup],
    *,
    timeout: float | None,
) -> Replicas:
    """Start one worker group for each copy of the weights that the ranks of a pool can hold.

    The groups are not watched: the loss of a replica ends no run.

    Args:
        settings: of the rollout.
        members: worker key → class with its arguments; one entry.
        started: receives every group, also those that are started again later.
        timeout: the deadline of a call, in seconds.

    Raises:
        ConfigError: another role runs on these ranks.
    """
    if len(members) != 1:
        key = "actor_rollout_ref.rollout.replicas.enable"
        raise ConfigError(
            f"{key}=true needs ranks on which only the rollout runs, but the workers of its pool "
            f"are {sorted(members)}; map Role.Rollout to a pool of its own, or set it to false",
            key=key,
        )
    parts = split_resource_pool(pool, rollout_of(settings).ranks_of_copy)
    (role,) = members

    def start(number: int) -> ReplicaGroup:
        group: WorkerGroup = backend.worker_group(
            parts[number], backend.colocate(members), timeout=timeout
        )
        started.append(group)
        view: ReplicaGroup = group.spawn([role])[role]
        return view

    return Replicas(start, len(parts), settings.replicas.restarts)
