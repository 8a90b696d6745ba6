"""The checkpoints of a run: from which one it is resumed, and after which steps it saves.

A checkpoint is saved before the validation of its step, so that a validation that fails loses no
step:

    update ──► save (validation_pending) ──► validate ──► log the step ──► record in the checkpoint

A run that is resumed from a checkpoint whose validation is pending begins with this validation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.checkpoint.folders import step_folder
from quadriga.checkpoint.marker import change_info
from quadriga.errors import InputError
from quadriga.observability.run_folder import RunFolder
from quadriga.trainer.run.resuming import (
    AnyRun,
    ControllerState,
    Resumed,
    inputs_of,
    read_resumed,
)
from quadriga.trainer.run.stopping import StopRequest

if TYPE_CHECKING:
    from quadriga.data import PromptLoader
    from quadriga.trainer.run.record import RunRecord

_log = logging.getLogger("quadriga")


class Checkpointing:
    """Finds the checkpoint of a run that is resumed, and says when the next one is due.

    Args:
        given: the settings as the user gave them, which a checkpoint records; None: `config`.

    Attributes:
        stop: whether a signal has asked the run to stop.
    """

    def __init__(self, config: AnyRun, loader: PromptLoader, given: AnyRun | None = None) -> None:
        trainer = config.trainer
        self.config = config
        self.loader = loader
        self.inputs = inputs_of(given or config)
        self.clock = SaveClock(trainer.save_interval_s)
        self.stop = StopRequest(save=trainer.save_on_stop, grace_s=trainer.stop_grace_s)
        self._last_saved = 0
        self._pending: tuple[Path, ControllerState] | None = None

    def resume(self) -> Resumed | None:
        """Find the checkpoint that `trainer.resume_mode` names, and move the loader to its
        position. The caller loads the states of the roles.

        Raises:
            CheckpointError: it is damaged, or belongs to other data or another model.
        """
        resumed = read_resumed(self.config, self.inputs, tell=True)
        if resumed is not None:
            resumed.state.continue_loader(self.loader, data_changed=resumed.data_changed)
            own = RunFolder(Path(self.config.trainer.default_local_dir).absolute())
            # A checkpoint of another run stays as it is.
            if resumed.state.validation_pending and own.holds_checkpoint(resumed.folder):
                self._pending = resumed.folder, resumed.state
        return resumed

    def due(self, step: int, *, last: bool) -> bool:
        """Whether a checkpoint is saved after a step. `last`: it is the last one of the run.

        It is saved once, also if this is asked before and after the validation of the step.
        """
        if step == self._last_saved:
            return False
        every = self.config.trainer.save_freq
        by_number = last or (every > 0 and step % every == 0)
        return by_number or self.clock.due or self.stop.requested

    def state(
        self,
        step: int,
        record: RunRecord,
        kl_controller: dict[str, float] | None = None,
        *,
        validation_pending: bool = False,
    ) -> ControllerState:
        """Return the state of the controller after a step."""
        return ControllerState(
            step,
            self.loader.state_dict(),
            kl_controller or {},
            self.inputs,
            record.last_validation,
            validation_pending,
            record.row,
        )

    def saved(self, root: Path, state: ControllerState) -> None:
        """Note that a checkpoint with this state was saved in the folder `root` of checkpoints."""
        self.clock.restart()
        self._last_saved = state.step
        self._pending = (step_folder(root, state.step), state) if state.validation_pending else None

    def end_pending(
        self, resumed: Resumed, record: RunRecord, validate: Callable[[], object]
    ) -> None:
        """Make the validation of the step of a checkpoint that lacks it, and record it there.

        `validate`: logs the validation.
        """
        if not resumed.state.validation_pending:
            return
        with record.ending(resumed.state.step):
            validate()
        self.record_validation(record.last_validation)

    def record_validation(self, validation: dict[str, float]) -> None:
        """Record the validation of a step in the checkpoint that was saved before it, if one was.

        A checkpoint that can no longer be written, because it was moved for example, is left as it
        is and named in a warning.
        """
        if self._pending is None:
            return
        (folder, state), self._pending = self._pending, None
        done = replace(state, validation=validation, validation_pending=False)
        try:
            change_info(folder, done.as_info())
        except InputError as error:
            _log.warning(
                "the validation is not recorded in the checkpoint of step %d, so a run that is "
                "resumed from it begins with a validation: %s",
                state.step,
                error,
            )


class SaveClock:
    """Says when `interval_s` seconds have passed since the last checkpoint; None: never."""

    def __init__(self, interval_s: float | None) -> None:
        self.interval_s = interval_s
        self.restart()

    def restart(self) -> None:
        """Count from now on."""
        self._began = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether the interval has passed."""
        return self.interval_s is not None and time.monotonic() - self._began >= self.interval_s
