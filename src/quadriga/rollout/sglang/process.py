"""Start the host of SGLang below a guard, read its log, and end it."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from quadriga.errors import RolloutDiedError, printable
from quadriga.parallel.distributed import rank
from quadriga.rollout.sglang.processes.frames import Json, write_frame

NAME = "sglang"
_GUARD = Path(__file__).with_name("processes") / "guard.py"
_HOST = "quadriga.rollout.sglang.processes.host"
_LOG_LINES = 12
_LOG_BYTES = 1 << 16
_LINE_LENGTH = 300
_START_S = 60.0  # until the host reads; SGLang is not imported yet
_log = logging.getLogger("quadriga")
_END_S = 10.0  # SIGKILL ends the processes at once, unless the system is very slow

_OF_THE_RANK = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables that describe the process group of the training, which SGLang must not join."""


class HostProcess:
    """The processes of one SGLang, from start to end.

    The host waits until `begin` is called.

    Args:
        python: the interpreter that has SGLang.
        variables: returns environment variables of the host, beside those of this process, for its
            folder.

    Attributes:
        folder: temporary files of the processes and their log; removed by `close`.
        stdin, stdout: file descriptors of the host's standard input and output.
    """

    def __init__(self, python: str, variables: Callable[[Path], Mapping[str, str]]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="quadriga-sglang-"))
        environment = {k: v for k, v in os.environ.items() if k not in _OF_THE_RANK}
        environment |= {"TMPDIR": str(self.folder), **variables(self.folder)}
        with open(self.folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_GUARD), str(self.folder), python, "-m", _HOST],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        # Closes the pipes and ends the processes also if `close` is never called.
        self.close = weakref.finalize(self, _end, self._process, self.folder)
        assert self._process.stdin is not None and self._process.stdout is not None
        self.stdin, self.stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.stdin, False)

    def begin(self, settings: Json) -> None:
        """Let the host start SGLang; see `host` for the settings."""
        try:
            write_frame(self.stdin, settings, b"", time.monotonic() + _START_S)
        except OSError as error:  # TimeoutError is one
            raise self.died("it was starting") from error

    @property
    def pid(self) -> int:
        """The process id of the guard, and the id of the process group."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the processes run."""
        return self._process.poll() is None

    def died(self, what: str) -> RolloutDiedError:
        """Return the error for processes that have ended: what was being done, and the log."""
        return RolloutDiedError(
            f"rollout engine {NAME!r} of rank {rank()}: its process ended while {what}; "
            f"{self.log()}. Correct the cause, or set rollout.options.restarts to start it again",
            engine=NAME,
            rank=rank(),
        )

    def log(self) -> str:
        """Return the last lines of the log in one line of text."""
        try:
            with open(self.folder / "log", "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - _LOG_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return "its log is gone"
        lines = [line.strip()[:_LINE_LENGTH] for line in printable(text).splitlines()]
        lines = [line for line in lines if line][-_LOG_LINES:]
        return f"the last lines of its log: {' | '.join(lines)}" if lines else "its log is empty"


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    try:
        if process.poll() is None:
            process.terminate()  # the guard ends the group, and removes its shared memory
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(_END_S)
    except subprocess.TimeoutExpired:
        _log.warning("process %s of SGLang does not end, although it was killed", process.pid)
    finally:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        shutil.rmtree(folder, ignore_errors=True)
