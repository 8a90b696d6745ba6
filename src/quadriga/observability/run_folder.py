"""The folder of a run.

runs/run/
  config.yaml         all settings, with secrets masked
  metrics.jsonl       one object per step
  samples.jsonl       some responses of each step
  tensorboard/        the same metrics for TensorBoard
  learning_curve.png  reward and validation accuracy over steps
  checkpoints/        one folder per saved step
  model/              the trained policy as a Hugging Face folder
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.errors import ConfigError
from quadriga.observability.jsonl import cannot_write, keep_rows

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
TENSORBOARD = "tensorboard"
PLOT = "learning_curve.png"
CHECKPOINTS = "checkpoints"
MODEL = "model"
_MARKS = (CONFIG, METRICS)  # a folder with one of these holds a run
_ALL = (CONFIG, METRICS, SAMPLES, TENSORBOARD, PLOT, CHECKPOINTS, MODEL)


@dataclass(frozen=True)
class RunFolder:
    """The paths in the folder of a run. Only `open` creates it, not the constructor."""

    path: Path

    @classmethod
    def open(
        cls,
        path: str | Path,
        config: DataclassInstance,
        *,
        resume: bool = False,
        overwrite: bool = False,
    ) -> RunFolder:
        """Create the folder or continue in it, and write the settings.

        If the folder already holds a run, `resume` keeps that run, `overwrite` removes its files
        and no others, and without both `ConfigError` is raised. Raises `InputError` if the folder
        cannot be written.
        """
        from quadriga.config.loading import to_yaml

        folder = cls(Path(path))
        folder.check(resume=resume, overwrite=overwrite)
        try:
            if overwrite and not resume:
                folder.empty()
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.config.write_text(to_yaml(config))
        except OSError as error:
            raise cannot_write(folder.path, error) from error
        return folder

    def check(self, *, resume: bool = False, overwrite: bool = False) -> None:
        """Raise `ConfigError` if `open` would, without writing anything."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(
                f"trainer.default_local_dir: {self.path} is a file, not a folder",
                key="trainer.default_local_dir",
            )
        if self.holds_run and not resume and not overwrite:
            raise ConfigError(
                f"{self.path} already holds a run; choose another trainer.default_local_dir, "
                "resume the run (trainer.resume_mode=auto) or replace it (trainer.overwrite=true)",
                key="trainer.default_local_dir",
            )

    @property
    def holds_run(self) -> bool:
        """Whether the folder holds the files of a run."""
        return any((self.path / mark).exists() for mark in _MARKS)

    @property
    def config(self) -> Path:
        """All settings, as YAML."""
        return self.path / CONFIG

    @property
    def metrics(self) -> Path:
        """The metrics, one JSON object per step."""
        return self.path / METRICS

    @property
    def samples(self) -> Path:
        """Responses, one JSON object per line (`samples.Sample`)."""
        return self.path / SAMPLES

    @property
    def tensorboard(self) -> Path:
        """The event files of TensorBoard."""
        return self.path / TENSORBOARD

    @property
    def plot(self) -> Path:
        """The learning curve, a PNG."""
        return self.path / PLOT

    @property
    def checkpoints(self) -> Path:
        """The checkpoints, one folder per saved step."""
        return self.path / CHECKPOINTS

    @property
    def model(self) -> Path:
        """The trained policy as a Hugging Face folder."""
        return self.path / MODEL

    def forget_after(self, step: int) -> None:
        """Remove metrics and samples of steps after `step`.

        A resumed run continues after the step of its checkpoint and writes later steps again.
        """
        for path in (self.metrics, self.samples):
            if path.exists():
                keep_rows(path, lambda row: int(row.get("step", 0)) <= step)

    def empty(self) -> None:
        """Remove the files of a run, and no others."""
        for name in _ALL:
            entry = self.path / name
            # A link is removed itself; `rmtree` would empty the folder that it points to.
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
