"""The worker group that generates for `quadriga generate` and `quadriga eval`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quadriga.config.commands import GenerationConfig
from quadriga.config.role_ranks import trainer_settings
from quadriga.config.schema import ActorRolloutRefConfig, RolloutConfig, RolloutEngineConfig
from quadriga.models.folder import with_absolute_paths
from quadriga.protocol import DataProto
from quadriga.trainer.checks.engines import check_device
from quadriga.trainer.replicas.replica import FROM_FOLDER, Replicas, start_replicas
from quadriga.trainer.replicas.rollout import ReplicatedRollout
from quadriga.trainer.role_workers import threads_per_rank
from quadriga.trainer.roles.placement import Role
from quadriga.trainer.worker_groups import (
    ALIVENESS_CHECK_S,
    StartedGroups,
    close_on_error,
    one_pool,
    open_backend,
)

if TYPE_CHECKING:
    from quadriga.single_controller import WorkerGroup
    from quadriga.workers.generation import GeneratingGroup


class FolderReplicas(ReplicatedRollout):
    """Replicas that hold the weights of the model folder, which no weight sync changes.

    A lost replica has the right weights as soon as it has loaded the model again, so it is started
    again (`rollout.replicas.restarts`) before the next batch.
    """

    def __init__(self, replicas: Replicas, settings: RolloutEngineConfig) -> None:
        replicas.version = FROM_FOLDER
        super().__init__(replicas, settings.replicas, most_rows=settings.micro_batch_size)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Sample one response per row, after lost replicas were started again.

        Raises:
            As `ReplicatedRollout.generate_sequences`.
        """
        self.replicas.restart_lost()
        return super().generate_sequences(prompts)


@contextmanager
def rollout_group(config: GenerationConfig) -> Iterator[GeneratingGroup]:
    """Start the ranks, load the model on each of them, and stop them after the block.

    Each rank has a rollout engine, which samples by `config.sampling`. All ranks are one group, or
    each copy of the weights is a replica (`rollout.replicas`).

    Raises:
        PlacementError: the nodes cannot hold the ranks. Nothing was started.
        WorkerError: a rank failed while it started.
    """
    from quadriga.single_controller import ClassWithInitArgs
    from quadriga.workers import ActorRolloutRefWorker, RankRuntime

    trainer = trainer_settings(config.trainer)
    check_device(trainer)
    runtime = RankRuntime(
        device=trainer.device,
        threads=threads_per_rank(trainer),
        seed=config.seed,
        max_response_length=config.max_response_length,
    )
    worker = ClassWithInitArgs(
        ActorRolloutRefWorker, config=_policy(config), role=Role.Rollout.key, runtime=runtime
    )
    backend = open_backend(trainer)
    with close_on_error(backend) as groups:
        manager = one_pool(trainer, [Role.Rollout], backend)
        manager.create_resource_pool()
        pool, timeout = manager.get_resource_pool(Role.Rollout), trainer.call_timeout_s
        rollout: GeneratingGroup
        if config.rollout.replicas.enable:
            members = {Role.Rollout.key: worker}
            replicas = start_replicas(
                config.rollout, backend, pool, members, groups, timeout=timeout
            )
            replicas.init_model()
            rollout = FolderReplicas(replicas, config.rollout)
        else:
            group: WorkerGroup = backend.worker_group(pool, worker, timeout=timeout)
            groups.append(group)
            group.start_worker_aliveness_check(ALIVENESS_CHECK_S)
            group.init_model()
            rollout = group
    try:
        yield rollout
    finally:
        StartedGroups(backend, groups).close()


def _policy(config: GenerationConfig) -> ActorRolloutRefConfig:
    """Return the settings of the worker: the engine, and how it samples."""
    engine = {
        field.name: getattr(config.rollout, field.name)
        for field in dataclasses.fields(RolloutEngineConfig)
    }
    return ActorRolloutRefConfig(
        model=with_absolute_paths(config.model),
        rollout=RolloutConfig(**engine, n=config.n, sampling=config.sampling),
    )
