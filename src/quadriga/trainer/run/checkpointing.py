"""The checkpoints of a run: from which one it is resumed, and after which steps it saves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

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


class Checkpointing:
    """Finds the checkpoint of a run that is resumed, and says when the next one is due.

    Attributes:
        stop: whether a signal has asked the run to stop.
    """

    def __init__(self, config: AnyRun, loader: PromptLoader) -> None:
        trainer = config.trainer
        self.config = config
        self.loader = loader
        self.inputs = inputs_of(config)
        self.clock = SaveClock(trainer.save_interval_s)
        self.stop = StopRequest(save=trainer.save_on_stop, grace_s=trainer.stop_grace_s)

    def resume(self) -> Resumed | None:
        """Find the checkpoint that `trainer.resume_mode` names, and move the loader to its
        position. The caller loads the states of the roles.

        Raises:
            CheckpointError: it is damaged, or belongs to other data or another model.
        """
        resumed = read_resumed(self.config, self.inputs, tell=True)
        if resumed is not None:
            resumed.state.continue_loader(self.loader, data_changed=resumed.data_changed)
        return resumed

    def due(self, step: int, *, last: bool) -> bool:
        """Whether a checkpoint is saved after a step. `last`: it is the last one of the run."""
        every = self.config.trainer.save_freq
        by_number = last or (every > 0 and step % every == 0)
        return by_number or self.clock.due or self.stop.requested

    def state(
        self, step: int, validation: dict[str, float], kl_controller: dict[str, float] | None = None
    ) -> ControllerState:
        """Return the state of the controller after a step."""
        position = self.loader.state_dict()
        return ControllerState(step, position, kl_controller or {}, self.inputs, validation)


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
