"""Where a run goes on: the newest complete checkpoint, and what the controller keeps in it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quadriga.checkpoint.folders import latest_checkpoint, read_marker
from quadriga.config.schema import TrainerConfig
from quadriga.errors import CheckpointError
from quadriga.observability.run_folder import CHECKPOINTS


@dataclass(frozen=True)
class ControllerState:
    """What the controller must know to go on as if it had never stopped."""

    step: int
    loader: dict[str, int]
    kl_controller: dict[str, Any]

    def as_info(self) -> dict[str, Any]:
        """As plain JSON values, for the checkpoint's marker."""
        return asdict(self)


def checkpoint_to_resume(trainer: TrainerConfig) -> Path | None:
    """The folder that `trainer.resume_mode` means, or None for a fresh start.

    "auto": the newest complete checkpoint of the run folder, if there is one.

    Raises:
        CheckpointError: the folder that was named is not there.
    """
    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "auto":
        return latest_checkpoint(Path(trainer.default_local_dir) / CHECKPOINTS)
    path = Path(trainer.resume_mode)
    if not path.is_dir():
        raise CheckpointError(
            f"trainer.resume_mode={path}: no such folder; give disable, auto, or a checkpoint's "
            "folder",
            path=str(path),
        )
    return path


def read_state(checkpoint: Path) -> ControllerState:
    """The controller's part of a checkpoint.

    Raises:
        CheckpointError: the checkpoint is not complete, or is not a training run's.
    """
    info = read_marker(checkpoint)
    try:
        return ControllerState(**info)
    except TypeError as error:
        raise CheckpointError(
            f"{checkpoint} holds no training run's state: {error}", path=str(checkpoint)
        ) from error
