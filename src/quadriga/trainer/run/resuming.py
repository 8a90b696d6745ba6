"""Resuming a run: which checkpoint is loaded, and what the controller stores in it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from quadriga.checkpoint.folders import latest_checkpoint, read_marker
from quadriga.config.schema import TrainerConfig
from quadriga.errors import CheckpointError
from quadriga.observability.run_folder import CHECKPOINTS


@dataclass(frozen=True)
class ControllerState:
    """The state of the controller that a resumed run needs to repeat the steps of an
    uninterrupted one."""

    step: int
    loader: dict[str, int]
    kl_controller: dict[str, float]

    def as_info(self) -> dict[str, object]:
        """Return the state as JSON values, for the marker of the checkpoint."""
        return asdict(self)


def checkpoint_to_resume(trainer: TrainerConfig) -> Path | None:
    """Return the folder that `trainer.resume_mode` names, or None for a fresh start.

    "auto" names the newest complete checkpoint of the run folder, if there is one.

    Raises:
        CheckpointError: the named folder does not exist.
    """
    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "auto":
        return latest_checkpoint(Path(trainer.default_local_dir) / CHECKPOINTS)
    path = Path(trainer.resume_mode)
    if not path.is_dir():
        raise CheckpointError(
            f"trainer.resume_mode={path}: no such folder; set it to disable, auto, or the folder "
            "of a checkpoint",
            path=str(path),
        )
    return path


def read_state(checkpoint: Path) -> ControllerState:
    """Read the controller's state from a checkpoint.

    Raises:
        CheckpointError: the checkpoint is incomplete, or was not written by a training run.
    """
    info = read_marker(checkpoint)
    try:
        return ControllerState(**info)
    except TypeError as error:
        raise CheckpointError(
            f"{checkpoint} does not hold the state of a training run: {error}",
            path=str(checkpoint),
        ) from error
