"""Runs with one worker group, such as fine-tuning: its start, its schedule, its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quadriga.config.schema import RunConfig
from quadriga.protocol import DataProto
from quadriga.trainer.checkpoints import Checkpointing
from quadriga.trainer.roles.placement import Role
from quadriga.trainer.worker_groups import (
    ALIVENESS_CHECK_S,
    StartedGroups,
    close_on_error,
    one_pool,
    open_backend,
)

if TYPE_CHECKING:
    from quadriga.data import PromptLoader
    from quadriga.single_controller import ClassWithInitArgs, WorkerGroup


def start_one_group(
    trainer: RunConfig, role: Role, worker: ClassWithInitArgs
) -> tuple[StartedGroups, WorkerGroup]:
    """Start one worker group on all ranks of a run, and load its models.

    Raises:
        PlacementError: the nodes cannot hold the ranks. Nothing was started.
        WorkerError: a rank failed while it started.
    """
    backend = open_backend(trainer)
    with close_on_error(backend) as groups:
        manager = one_pool(trainer, [role], backend)
        manager.create_resource_pool()
        group: WorkerGroup = backend.worker_group(
            manager.get_resource_pool(role), worker, timeout=trainer.call_timeout_s
        )
        groups.append(group)
        group.start_worker_aliveness_check(ALIVENESS_CHECK_S)
        group.init_model()
        return StartedGroups(backend=backend, groups=groups), group


def total_steps_of(trainer: RunConfig, loader: PromptLoader) -> int:
    """Return the number of steps of a run."""
    return trainer.total_training_steps or len(loader) * trainer.total_epochs


def steps_of(
    checkpoints: Checkpointing, loader: PromptLoader, total: int, first: int
) -> Iterator[tuple[int, DataProto]]:
    """Yield (number of the step, its batch) after step `first`, epoch after epoch.

    Within a step the first signal lets the step end.
    """
    step = first
    with checkpoints.stop.steps():
        while step < total:
            for rows in loader:
                step += 1
                yield step, rows
                if step == total:
                    break


def is_due(trainer: RunConfig, step: int, total: int) -> bool:
    """Whether a validation is due: after the last step, and every `test_freq` steps."""
    return step == total or (trainer.test_freq > 0 and step % trainer.test_freq == 0)
