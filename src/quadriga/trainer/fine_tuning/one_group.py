"""Runs with one worker group, such as fine-tuning: its start, its schedule, its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from quadriga.config.schema import RunConfig
from quadriga.protocol import DataProto
from quadriga.trainer.checkpoints import Checkpointing, Resumed
from quadriga.trainer.record import RunRecord
from quadriga.trainer.roles.placement import Role
from quadriga.trainer.worker_groups import (
    ALIVENESS_CHECK_S,
    SavingGroup,
    StartedGroups,
    close_on_error,
    one_pool,
    open_backend,
    save_roles,
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


class OneGroupCheckpoints(Checkpointing):
    """The checkpoints of a run with one worker group, and its steps."""

    def steps(self, total: int, first: int) -> Iterator[tuple[int, DataProto]]:
        """Yield (number of the step, its batch) after step `first`, epoch after epoch.

        Within a step the first signal lets the step end.
        """
        step = first
        with self.stop.steps():
            while step < total:
                for rows in self.loader:
                    step += 1
                    yield step, rows
                    if step == total:
                        break

    def end_pending(
        self, resumed: Resumed, record: RunRecord, validate: Callable[[], object]
    ) -> None:
        """Make the validation of the step of a checkpoint that lacks it, and record it there.

        `validate`: logs the validation.
        """
        if resumed.state.validation_pending:
            with record.ending(resumed.state.step):
                validate()
            self.record_validation(record.last_validation)

    def save_if_due(
        self,
        record: RunRecord,
        groups: Mapping[str, SavingGroup],
        step: int,
        *,
        last: bool,
        validates: bool = False,
    ) -> None:
        """Save a checkpoint where the settings or a signal ask for it.

        Args:
            groups: by the names of their roles.
            last: the step is the last one of the run.
            validates: a validation follows.

        Raises:
            As `save_roles`.
        """
        if not self.due(step, last=last):
            return
        state = self.state(
            step,
            validation=record.last_validation,
            metrics=record.row,
            validation_pending=validates,
        )
        root, keep = record.folder.checkpoints, self.config.trainer.max_ckpt_to_keep
        with record.span("save"):
            save_roles(root, state, groups, keep)
        self.saved(root, state)

    def end_step(
        self,
        record: RunRecord,
        groups: Mapping[str, SavingGroup],
        step: int,
        *,
        last: bool,
        validate: Callable[[], bool] | None,
    ) -> bool:
        """Save and validate where these are due, and log the step. Then stop if a signal asks for
        it. Return whether the step is the last one of the run.

        It is saved first, so that a validation that fails loses no step.

        Args:
            groups: by the names of their roles.
            last: the step is the last one of the run, whatever the validation finds.
            validate: logs the validation, and returns whether the run has reached its goal. None:
                it is not due.

        Raises:
            As `save_roles` and `validate`.
        """
        with record.ending(step):
            self.save_if_due(record, groups, step, last=last, validates=validate is not None)
            if validate is not None:
                last |= validate()
        self.record_validation(record.last_validation)
        # If the goal is reached, a signal has come, or time has passed.
        self.save_if_due(record, groups, step, last=last)
        self.stop.stop_if_requested()
        return last
