"""The folder of a run.

runs/run/
  config.yaml         all settings, with secrets masked
  metrics.jsonl       one object per step
  samples.jsonl       some responses of each step
  events.jsonl        the environment of each start of the run, and warnings
  stream.jsonl        the order of the calls to the rollout, with trainer.max_staleness
  tensorboard/        the same metrics for TensorBoard
  wandb/ mlflow/ …    the files of trackers, if trainer.loggers contains them
  learning_curve.png  reward and validation score over steps
  report.html         all of this as one page (`quadriga report`)
  profile/            traces of the steps of trainer.profile.steps; calls.jsonl: when each rank
                      was at work in these
  checkpoints/        one folder per saved step
  model/              the trained policy as a Hugging Face folder
  run.lock            the run that writes here, while it does
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Literal, TypeAlias

from quadriga.config.paths import Dataclass, local_path
from quadriga.config.schema import RunConfig
from quadriga.errors import ConfigError
from quadriga.files import remove, writing
from quadriga.observability.jsonl import keep_rows, read_jsonl, step_of

Existing: TypeAlias = Literal["refuse", "restart", "overwrite", "resume"]
"""What happens to a run that a folder already holds. It is kept (resume), or all its files and no
others are removed (overwrite), or what it has written about its steps, if it has left neither a
checkpoint nor a model (restart)."""

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
EVENTS = "events.jsonl"
STREAM = "stream.jsonl"
TENSORBOARD = "tensorboard"
OF_TRACKERS = WANDB, MLFLOW, SWANLAB = "wandb", "mlflow", "swanlab"
PLOT = "learning_curve.png"
REPORT = "report.html"
PROFILE = "profile"
CALLS = f"{PROFILE}/calls.jsonl"
CHECKPOINTS = "checkpoints"
MODEL = "model"
_KEY = "trainer.default_local_dir"
_MARKS = (CONFIG, METRICS)  # a folder with one of these holds a run
# What an export that was killed leaves beside the model.
_REPLACED = f"{MODEL}.replaced"
_EXPORTS = (f"{MODEL}.partial", _REPLACED)
# What a run that begins again writes anew. Each start has its own run in other trackers.
OF_STEPS = (METRICS, SAMPLES, STREAM, TENSORBOARD, PLOT, REPORT, CALLS)
RECORDS = (*OF_STEPS, EVENTS)
ALL = (CONFIG, *RECORDS, *OF_TRACKERS, PROFILE, CHECKPOINTS, MODEL, *_EXPORTS)

_log = logging.getLogger("quadriga")


class RunFolder:
    """The paths in the folder of a run. Only `open` creates it, not the constructor.

    `lock` is held from `open` to `close`, so that no second run writes here.
    """

    def __init__(self, path: Path, lock: RunLock | None = None) -> None:
        self.path, self.lock = path, lock
        self.config = path / CONFIG
        self.metrics = path / METRICS
        self.samples = path / SAMPLES
        self.stream = path / STREAM
        self.tensorboard = path / TENSORBOARD
        self.events = path / EVENTS
        self.plot = path / PLOT
        self.report = path / REPORT
        self.checkpoints = path / CHECKPOINTS
        self.model = path / MODEL

    @classmethod
    def open(cls, path: str | Path, config: Dataclass, existing: Existing = "refuse") -> RunFolder:
        """Create the folder or continue in it, lock it, and write the settings.

        The path is made absolute: processes that were started in another folder get it too.

        Raises `ConfigError` if the folder holds a run that `existing` does not allow, or if another
        run writes there now. Raises `InputError` if the folder cannot be written.
        """
        from quadriga.config.loading import to_yaml

        folder = cls(Path(local_path(path)).absolute())
        folder.check(existing)
        with writing(folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.lock = RunLock.acquire(folder.path / LOCK, folder.path, _KEY)
        with ExitStack() as undo, writing(folder.path):
            undo.callback(folder.close)
            # A second time, under the lock: another run may have written here since the first.
            folder.check(existing, locked=True)
            for name in ALL if existing == "overwrite" else ():
                remove(folder.path / name)
            if existing == "restart" and folder.holds_run:
                _log.warning("%s has no checkpoint: its run begins again from step 1", folder.path)
                folder.forget_after(None)
            folder.config.write_text(to_yaml(config))
            undo.pop_all()
        return folder

    def renew_lock(self) -> None:
        """Raise `ConfigError` if the lock was deleted and another run has taken it."""
        if self.lock is not None:
            self.lock.renew()

    def close(self) -> None:
        """Release the lock. A second call does nothing."""
        if self.lock is not None:
            self.lock.release()

    def check(self, existing: Existing = "refuse", *, locked: bool = False) -> None:
        """Raise `ConfigError` if `open` would, without writing anything.

        `locked`: this run holds the lock, so it is not checked.
        """
        for folder in (self.path, self.checkpoints):
            if os.path.lexists(folder) and not folder.is_dir():
                what = "a file" if folder.exists() else "a link to nothing"
                raise ConfigError(f"{_KEY}: {folder} is {what}, not a folder", key=_KEY)
        if not locked:
            check_lock(self.path / LOCK, self.path, _KEY)
        written = [self.config, self.metrics, self.samples, self.plot]
        for file in written if existing != "overwrite" else ():
            if file.is_symlink():
                problem = "a symbolic link, and a run writes no file outside its folder"
            elif file.exists() and not file.is_file():
                problem = "no file, and a run writes a file there"
            else:
                continue
            raise ConfigError(f"{file} is {problem}; remove it, or choose another {_KEY}", key=_KEY)
        if self.holds_run and existing in ("refuse", "restart"):
            self._check_restart(existing)

    def _check_restart(self, existing: Existing) -> None:
        """Raise `ConfigError` unless the run in the folder may begin again."""
        if existing == "refuse":
            raise ConfigError(
                f"{self.path} already holds a run; choose another {_KEY}, resume the run "
                "(trainer.resume_mode=auto) or replace it (trainer.overwrite=true)",
                key=_KEY,
            )
        found = [path for path in (self.model, self.path / _REPLACED) if os.path.lexists(path)]
        saved = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        # A `.partial` folder is a checkpoint that was being written when the run was killed.
        found += [path for path in saved if path.suffix != ".partial"]
        if found:
            raise ConfigError(
                f"{self.path} already holds a run, without a checkpoint to resume but with "
                f"{found[0]}; with trainer.resume_mode=auto a run begins again only where the "
                f"one before has left neither a checkpoint nor a model; choose another {_KEY}, "
                "or replace the run (trainer.overwrite=true)",
                key=_KEY,
            )

    @property
    def holds_run(self) -> bool:
        """Whether the folder holds the files of a run."""
        return any((self.path / mark).exists() for mark in _MARKS)

    def existing(self, trainer: RunConfig, checkpoint: Path | None) -> Existing:
        """Return what the settings do with a run in the folder. Its checkpoint is resumed, and not
        that of a run in another folder."""
        if checkpoint is not None and checkpoint.resolve().parent == self.checkpoints.resolve():
            return "resume"
        if trainer.overwrite:
            return "overwrite"
        return "restart" if trainer.resume_mode == "auto" else "refuse"

    def forget_after(self, step: int | None) -> None:
        """Remove metrics and samples of steps after `step`; None: all that was written of steps.

        A resumed run continues after the step of its checkpoint and writes later steps again.
        """
        if step is None:
            for name in OF_STEPS:
                remove(self.path / name)
            return
        for path in (self.metrics, self.samples, self.path / CALLS):
            if path.exists():
                keep_rows(path, lambda row: step_of(row) <= step)

    def lacks(self, step: int) -> bool:
        """Whether there are metrics, but none of a step."""
        rows = read_jsonl(self.metrics) if self.metrics.exists() else [{"step": step}]
        return all(row.get("step") != step for row in rows)

    def removes(self, path: str | Path) -> bool:
        """Whether `overwrite` would remove a file or a folder that exists."""
        real = Path(path).resolve()
        removed = ((self.path / name).resolve() for name in ALL)
        return os.path.exists(real) and any(map(real.is_relative_to, removed))


LOCK = "run.lock"
_held: set[int] = set()
"""Files of the locks of this process. A forked child must not keep them locked."""


def _close_in_child() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_child)


class RunLock:
    """A lock that this process holds until `release`, or until it ends, in whatever way.

    The system locks an open file (`flock`) and releases it with the process, so the file that a
    killed run has left locks nothing: neither clocks nor process ids count. Its text says who holds
    the lock. On a file system without `flock` nothing is locked, and a warning says so.
    """

    def __init__(self, path: Path, file: int, owned: Path, key: str) -> None:
        self.path, self.owned, self.key = path, owned, key
        self._file = file

    @classmethod
    def acquire(cls, path: Path, owned: Path, key: str) -> RunLock:
        """Take the lock with the file `path`, whose folder must exist.

        Args:
            owned: the folder or file that only one run may write; the setting `key` names it.

        Raises:
            ConfigError: another run holds it.
            OSError: the lock file cannot be written.
        """
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = cls(path, os.open(path, flags, 0o644), owned, key)
            try:
                _lock(lock._file, fcntl.LOCK_EX, path, owned, key)
                if lock._is_at_path():
                    os.ftruncate(lock._file, 0)
                    os.pwrite(lock._file, this_run().encode(), 0)
                    _held.add(lock._file)
                    return lock
            except BaseException:
                os.close(lock._file)
                raise
            os.close(lock._file)  # its owner has deleted it since it was opened

    def renew(self) -> None:
        """Take the lock again if its file was deleted. Raises `ConfigError` if another run has."""
        if self._file >= 0 and not self._is_at_path():
            _log.warning("%s was deleted while the run that it names goes on", self.path)
            self.release()
            with writing(self.path):
                self._file = RunLock.acquire(self.path, self.owned, self.key)._file

    def release(self) -> None:
        """Delete the lock. A second call does nothing."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                if self._is_at_path():
                    self.path.unlink()
            _held.discard(self._file)
            os.close(self._file)
            self._file = -1

    def _is_at_path(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file), self.path.lstat())
        except FileNotFoundError:
            return False


_ATTEMPTS = 5


def check_lock(path: Path, owned: Path, key: str) -> None:
    """Raise `ConfigError` if another run holds the lock. Nothing is written."""
    try:
        # Neither a link to a device without an end nor a pipe without a writer is waited for.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # no lock, or no file, which `RunLock.acquire` refuses
        return
    try:
        _lock(file, fcntl.LOCK_SH, path, owned, key)
    finally:
        os.close(file)


def _lock(file: int, kind: int, path: Path, owned: Path, key: str) -> None:
    for _ in range(_ATTEMPTS):  # `check_lock` of another run holds the lock for a moment
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        except OSError as error:
            text = "%s cannot be locked (%s): nothing keeps a second run out of %s"
            _log.warning(text, path, error.strerror, owned)
            return
        else:
            return
    owner = os.pread(file, 200, 0).decode(errors="replace")
    raise ConfigError(
        f"{owned} is in use by another run ({owner}, as {path.name} there says); choose another "
        f"{key}, or wait until that run has ended",
        key=key,
    )


def this_run() -> str:
    """Return a name of this process for people."""
    user = os.environ.get("USER") or os.getuid()
    began = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} of {user} on {socket.gethostname()}, since {began}"
