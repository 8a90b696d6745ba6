"""`quadriga train --supervise`: the controller in a child process, started again after a loss.

    supervisor ── controller ── what the run starts

    the controller ends                              the supervisor
    with code 75 (`LOST`)                            starts it again: a part of the run was lost
    by a signal, of the kernel without memory too    starts it again
    with another code, or after a signal for it      ends with the same code

It passes signals on, and kills what a controller has left before it starts the next one, and at its
own end. Restarts are counted as those within a run are: `trainer.max_restarts` of them within
`trainer.restart_window_s`, or without a new step. The next controller goes on from the newest
checkpoint. The supervisor imports neither torch nor code of the user.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

import psutil

from quadriga.cli.main import LOST, Invocation, main
from quadriga.config.loading import given_trainer
from quadriga.config.paths import local_path
from quadriga.config.schema import RunConfig
from quadriga.containment import ADOPTS_ORPHANS, ENDS_WITH_PARENT, end_all, prctl, reap
from quadriga.errors import DataError
from quadriga.observability.jsonl import read_jsonl, step_of
from quadriga.observability.run_folder import RunFolder

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
PASSED = (*STOPS, signal.SIGUSR2)
LEFT_S = 10.0
"""Seconds in which what a controller has left may end by itself."""
_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Processes of Ray that look for their control store for a minute, and have nothing to remove."""


def command(words: Sequence[str]) -> list[str]:
    """Return the command of a controller."""
    return [sys.executable, "-P", "-m", "quadriga.cli.supervise", *words]


def supervise(invocation: Invocation) -> int:
    """Run a command in a child process, again after each loss. Return its exit code.

    Raises `InputError` for settings of the run that are wrong. Nothing was started.
    """
    run = SupervisedRun.of(invocation)
    passed = [number for number in PASSED if signal.getsignal(number) != signal.SIG_IGN]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*passed, signal.SIGCHLD, signal.SIGTSTP})
    prctl(ADOPTS_ORPHANS, 1)

    def begin() -> None:
        prctl(ENDS_WITH_PARENT, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    changes: list[str] = []
    try:
        while True:
            words = command([*invocation.words, *changes])
            # A session of its own: what the terminal and its shell send comes here, and once.
            child = subprocess.Popen(words, start_new_session=True, preexec_fn=begin)
            code, stopped = _wait(child.pid, passed)
            child.returncode = code
            _end_left(child.pid)
            if stopped or not (code == LOST or code < 0) or not run.again(code):
                return code if code >= 0 else 128 - code
            changes = run.changes()
    finally:
        prctl(ADOPTS_ORPHANS, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(child: int, passed: Iterable[signal.Signals]) -> tuple[int, bool]:
    """Pass signals on until the child ends. Return its exit code, and whether it was stopped."""
    stopped, waited = False, {*passed, signal.SIGCHLD, signal.SIGTSTP}
    while (status := reap(child)) is None:
        number = signal.sigwaitinfo(waited).si_signo
        if number == signal.SIGTSTP:
            os.kill(child, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)  # until SIGCONT
            os.kill(child, signal.SIGCONT)
        elif number != signal.SIGCHLD:
            stopped |= number in STOPS
            os.kill(child, number)
    return os.waitstatus_to_exitcode(status), stopped


def _end_left(child: int) -> None:
    """Wait until what a controller has started has ended, and kill it after `LEFT_S`."""
    deadline = time.monotonic() + LEFT_S
    while time.monotonic() < deadline and _ending():
        reap(child)
        time.sleep(0.05)
    end_all(child)


def _ending() -> bool:
    """Return whether a process is left that is no agent of Ray."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if not " ".join(process.cmdline()).startswith(_AGENTS):
                return True
    return False


@dataclass
class SupervisedRun:
    """What the supervisor knows of a run: some of its settings, and the files in its folder.

    Attributes:
        trainer: the section of the settings, as it was given.
        found: what identified `config.yaml` before the run began.
        counted: time and last step of each restart.
    """

    trainer: RunConfig
    folder: RunFolder
    found: tuple[int, ...]
    counted: list[tuple[float, int]] = field(default_factory=list)

    @classmethod
    def of(cls, invocation: Invocation) -> SupervisedRun:
        """Read the settings that the supervisor needs. No code of the user runs."""
        settings = invocation.command.settings
        assert settings is not None
        if invocation.verl is None:
            trainer = given_trainer(settings, invocation.overrides, invocation.file)
        else:
            with redirect_stderr(StringIO()):  # the controller prints the translation
                trainer = vars(invocation.load())["trainer"]
        folder = RunFolder(Path(local_path(trainer.default_local_dir)).absolute())
        return cls(trainer, folder, _identity(folder.config))

    def again(self, code: int) -> bool:
        """Return whether a controller that has ended is started again, and say so."""
        now, step, window_s = time.monotonic(), self._step(), self.trainer.restart_window_s
        self.counted = [
            (at, last) for at, last in self.counted if at > now - window_s or last >= step
        ]
        how = (
            f"with exit code {code}"
            if code >= 0
            else f"by signal {-code}, {signal.strsignal(-code)},"
        )
        count, allowed = len(self.counted) + 1, self.trainer.max_restarts
        self.counted.append((now, step))
        if count > allowed:
            text = f"it is not started again: trainer.max_restarts={allowed} within "
            text += f"{window_s:g} s, or without a new step"
        else:
            text = f"restart {count} of {allowed} begins"
        print(f"the controller has ended {how} after step {step}; {text}", file=sys.stderr)
        return count <= allowed

    def changes(self) -> list[str]:
        """Return the settings with which the next controller goes on."""
        if _identity(self.folder.config) == self.found:  # it has not opened the folder: as given
            return []
        saved = self.folder.checkpoints.glob("global_step_*/COMPLETE.json")
        newest = self.trainer.resume_mode in ("auto", "disable")
        if newest or any(file.parent.suffix == "" for file in saved):
            return ["trainer.resume_mode=auto", "trainer.overwrite=false"]
        return ["trainer.overwrite=true"]  # from the checkpoint that was named, of another run

    def _step(self) -> int:
        """Return the last step in the metrics; 0 if there is none."""
        try:
            rows = list(read_jsonl(self.folder.metrics))
        except DataError:
            return 0
        return max(map(step_of, rows), default=0)


def _identity(file: Path) -> tuple[int, ...]:
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


if __name__ == "__main__":
    from quadriga.trainer import checkpoints

    # A signal to all processes of a job arrives twice: from its sender, and passed on.
    checkpoints.StopRequest.merged_s = 1.0
    sys.exit(main())
