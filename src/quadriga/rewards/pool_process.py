"""One process of a `RewardPool`, as the pool sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Pipe

from quadriga.rewards.outcome import CRASHED, TIMED_OUT, Outcome, Report, Sample

_EXIT_S = 5.0  # time for a process to exit after it has closed its pipe
_END_S = 7.0  # time for a supervisor to end all its processes
_SEND_S = 30  # time for the process to read more of a sample
_RECEIVE_S = 5  # time for the rest of a report to arrive: other processes wait for it
_MAX_REPORT = 1 << 20  # bytes of a report; `outcome` bounds its parts to less


@dataclass(frozen=True)
class NotCalled:
    """A process has ended before it called the function of its sample."""

    detail: str


class PoolProcess:
    """One process: idle, or busy with sample `number` until `deadline`.

    Attributes:
        popen: the supervisor; its child scores.
        process: the process id of this child.
        called: whether the function of the sample has been called; selects the deadline.
        usable: false once the process is killed.
    """

    def __init__(self, memory_gb: float | None = None) -> None:
        self.connection, theirs = Pipe()
        # A process that stops reading or writing in the middle of a message must not block the
        # pool: the kernel ends such a call with an error.
        with socket.socket(fileno=os.dup(self.connection.fileno())) as ours:
            limits = {socket.SO_SNDTIMEO: _SEND_S, socket.SO_RCVTIMEO: _RECEIVE_S}
            for option, seconds in limits.items():
                ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))
        megabytes = round(memory_gb * 1024) if memory_gb else 0
        program = [sys.executable, "-m", "quadriga.rewards.pool_worker"]
        self.popen = subprocess.Popen(
            [*program, str(theirs.fileno()), str(megabytes)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # What a function prints goes to standard error: standard output is the run's own.
            stdout=sys.__stderr__ if sys.__stderr__ else subprocess.DEVNULL,
            # The processes score in parallel, so more threads in each would compete for the CPUs.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        # The process holds the only copy of its end now, so its death closes the pipe.
        theirs.close()
        self.process = -1
        self.busy = False
        self.usable = True
        self.called = False
        self.number = -1
        self.deadline = 0.0

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Return whether the process has reported that it is ready, within the time."""
        try:
            if self.connection.poll(timeout_s):
                self.process = Report.decode(self.connection.recv_bytes(_MAX_REPORT)).process
                return True
        except (EOFError, OSError, ValueError):
            pass  # it ended before it was ready
        return False

    def give(self, number: int, sample: Sample, start_timeout_s: float) -> None:
        """Send a sample to this idle process."""
        self.number = number
        self.busy = True
        self.called = False
        self.deadline = time.monotonic() + start_timeout_s
        with contextlib.suppress(OSError):
            # An error means that it ended while it was idle: `finish` reads the end of its pipe.
            self.connection.send((number, sample))

    def finish(self, timeout_s: float, start_timeout_s: float) -> Outcome | NotCalled | None:
        """Return the outcome of the sample, or None while the function is running."""
        try:
            if self.connection.poll():
                report = Report.decode(self.connection.recv_bytes(_MAX_REPORT))
                return self._accept(report, timeout_s)
        except (EOFError, OSError) as error:
            return self._ended(error)
        except ValueError as error:
            return self._fail(Outcome(CRASHED, detail=f"its process sent {error}"))
        if time.monotonic() < self.deadline:
            return None
        exceeded = f"{timeout_s:g} s" if self.called else f"{start_timeout_s:g} s for its import"
        return self._fail(Outcome(TIMED_OUT, detail=f"exceeded its deadline of {exceeded}"))

    def _accept(self, report: Report, timeout_s: float) -> Outcome | None:
        if (report.sample, report.process) != (self.number, self.process):
            detail = (
                f"its process sent a report for sample {report.sample} of process {report.process}"
                f", expected sample {self.number} of process {self.process}"
            )
            return self._fail(Outcome(CRASHED, detail=detail))
        if report.outcome is None:
            self.called = True
            self.deadline = time.monotonic() + timeout_s
            return None
        self.busy = False
        return report.outcome

    def _fail(self, outcome: Outcome) -> Outcome:
        self.kill()
        return outcome

    def _ended(self, error: Exception) -> Outcome | NotCalled:
        """Return the outcome for a process that has closed its pipe."""
        # The pipe closes a moment before the exit code can be read.
        try:
            code = self.popen.wait(timeout=_EXIT_S)
            how = f"ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
        except subprocess.TimeoutExpired:
            how = f"closed its pipe or sent a message that is too long ({type(error).__name__})"
        self.kill()
        detail = f"its process {how}"
        return Outcome(CRASHED, detail=detail) if self.called else NotCalled(detail)

    def ask_to_end(self) -> None:
        """Let the supervisor kill the process and what it has started; do not wait."""
        self.popen.terminate()

    def kill(self) -> None:
        """Kill the process with everything that it has started, and wait for its end.

        A process that waits in the kernel, for example for a lost file system, ends later.
        """
        self.usable = self.busy = False
        self.ask_to_end()
        try:
            self.popen.wait(_END_S)
        except subprocess.TimeoutExpired:
            # The supervisor is stopped. Without it the kernel kills its child as well.
            for group in (self.popen.pid, self.process):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if group > 0:
                        os.killpg(group, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(_END_S)
        self.connection.close()
