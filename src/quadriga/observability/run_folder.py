"""The folder a run leaves behind.

runs/run/
  config.yaml         every setting, resolved; secrets masked
  metrics.jsonl       one object a step
  samples.jsonl       a few answers a step
  tensorboard/        the same metrics for TensorBoard
  learning_curve.png  reward and accuracy over steps
  checkpoints/        what a run resumes from
  model/              the trained policy as a Hugging Face folder
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quadriga.errors import ConfigError
from quadriga.observability.jsonl import cannot_write, keep_rows

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
TENSORBOARD = "tensorboard"
PLOT = "learning_curve.png"
CHECKPOINTS = "checkpoints"
MODEL = "model"
_MARKS = (CONFIG, METRICS)  # either of these and the folder holds a run
_ALL = (CONFIG, METRICS, SAMPLES, TENSORBOARD, PLOT, CHECKPOINTS, MODEL)


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run's folder. `open` makes it; the constructor touches nothing."""

    path: Path

    @classmethod
    def open(
        cls, path: str | Path, config: Any, *, resume: bool = False, overwrite: bool = False
    ) -> RunFolder:
        """Make the folder, or go on in it, and write the resolved settings.

        A folder that already holds a run is continued with `resume`, emptied of that run (and of
        nothing else) with `overwrite`, and refused otherwise. Raises `ConfigError` then, and
        `InputError` when the folder cannot be written.
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
        """Raise `ConfigError` where `open` would refuse, before anything is started or written."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"trainer.default_local_dir: {self.path} is a file, not a folder")
        if self.holds_run and not resume and not overwrite:
            raise ConfigError(
                f"{self.path} already holds a run; choose another trainer.default_local_dir, go on "
                "with it (trainer.resume_mode=auto) or replace it (trainer.overwrite=true)",
                key="trainer.default_local_dir",
            )

    @property
    def holds_run(self) -> bool:
        """Whether a run was written here."""
        return any((self.path / mark).exists() for mark in _MARKS)

    @property
    def config(self) -> Path:
        """The resolved settings, YAML."""
        return self.path / CONFIG

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / METRICS

    @property
    def samples(self) -> Path:
        """Answers, one JSON object a line (`samples.Sample`)."""
        return self.path / SAMPLES

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.path / TENSORBOARD

    @property
    def plot(self) -> Path:
        """The learning curve, PNG."""
        return self.path / PLOT

    @property
    def checkpoints(self) -> Path:
        """Checkpoints, one folder a step."""
        return self.path / CHECKPOINTS

    @property
    def model(self) -> Path:
        """The trained policy, a Hugging Face folder."""
        return self.path / MODEL

    def forget_after(self, step: int) -> None:
        """Drop metrics and samples of later steps, before a resumed run writes them again."""
        for path in (self.metrics, self.samples):
            if path.exists():
                keep_rows(path, lambda row: int(row.get("step", 0)) <= step)

    def empty(self) -> None:
        """Remove what a run writes here, and nothing else."""
        for name in _ALL:
            entry = self.path / name
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
