"""A run of `quadriga train` in a process of its own, and all processes that it has started."""

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from processes import command_line

_MARK = "QUADRIGA_TEST_RUN"  # every process inherits this variable, whatever its parent
TRAIN = ("-m", "quadriga.cli.main", "train")


class RunProcess:
    """`quadriga train` with these settings, or another command. `output` is what it prints."""

    def __init__(
        self, overrides: Sequence[str], output: Path, command: Sequence[str] = TRAIN
    ) -> None:
        self.token = secrets.token_hex(8)
        self.output = output
        with output.open("wb") as file:
            self.popen = subprocess.Popen(
                [sys.executable, *command, *overrides], stdout=file, stderr=subprocess.STDOUT,
                env={**os.environ, _MARK: self.token}, start_new_session=True,
            )  # fmt: skip

    def processes(self) -> list[psutil.Process]:
        """Return all living processes of the run, the controller included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                marked = process.environ().get(_MARK) == self.token
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait for a condition; fail with the output of the run if it ends or takes too long."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            ended = self.popen.poll() is not None
            assert not ended and time.monotonic() < deadline, self.output.read_text()[-3000:]
            time.sleep(0.1)

    def seconds_until_empty(self, timeout_s: float) -> float:
        """Return how long it takes until no process is left; fail with their names."""
        began = time.monotonic()
        while left := self.processes():
            waited = time.monotonic() - began
            names = [f"{p.pid} {command_line(p)[:80]}" for p in left]
            assert waited < timeout_s, f"left after {waited:.0f} s: {names}"
            time.sleep(0.1)
        return time.monotonic() - began


@contextlib.contextmanager
def started_run(
    overrides: Sequence[str], output: Path, command: Sequence[str] = TRAIN
) -> Iterator[RunProcess]:
    """Start a run, and kill what is left of it at the end."""
    run = RunProcess(overrides, output, command)
    try:
        yield run
    finally:
        for process in run.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        run.popen.wait()
