"""The tracker `wandb`: sends the metrics of each step to Weights & Biases (extra `wandb`)."""

from __future__ import annotations

import importlib.util
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.errors import ConfigError
from quadriga.observability.jsonl import cannot_write
from quadriga.observability.run_folder import WANDB

if TYPE_CHECKING:
    from quadriga.observability.trackers import RunInfo

_RUN_ID = "run_id.txt"


def check_wandb() -> None:
    """Raise `ConfigError` if the package is not installed."""
    if importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "trainer.loggers contains 'wandb', but the package wandb is not installed; "
            "run pip install 'quadriga[wandb]'"
        )


class WandbTracker:
    """Logs to the run `trainer.experiment_name` of the project `trainer.project_name`.

    The files of wandb are written under `wandb/` in the run folder. A resumed run of Quadriga
    continues the same run of wandb. Set WANDB_MODE=offline to send nothing.
    """

    def __init__(self, run: RunInfo) -> None:
        import wandb

        folder = run.folder.path / WANDB
        self._run = wandb.init(
            project=run.project_name,
            name=run.experiment_name,
            id=_run_id(folder, resumed=run.first_step > 0),
            resume="allow",
            dir=str(run.folder.path),
            settings=wandb.Settings(silent=True, console="off", save_code=False, disable_git=True),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _run_id(folder: Path, *, resumed: bool) -> str:
    """Return the id of the run that this one continues, or of a new run. Keep it on disk."""
    file = folder / _RUN_ID
    try:
        if resumed and file.exists():
            return file.read_text(encoding="ascii").strip()
        new = uuid.uuid4().hex[:12]
        folder.mkdir(exist_ok=True)
        file.write_text(new, encoding="ascii")
        return new
    except OSError as error:
        raise cannot_write(file, error) from error
