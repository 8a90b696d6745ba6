"""Score samples in other processes, with a deadline per sample.

A process scores one sample at a time, so the pool knows which sample a hanging or dead process was
scoring. It kills and replaces that process, and other samples are not affected. A
`multiprocessing.Pool` cannot do this: it has no deadline per task, and a process that crashes
breaks the pool. The processes run `pool_worker` as a program, so a script that creates a pool needs
no `if __name__ == "__main__"` guard.

The messages between the pool and one process, and the deadline by which each must be received:

    pool                  process
     │ ◄──── STARTED ──────  │   it has imported quadriga                  start_timeout_s
     │ ───── Sample ──────►  │
     │ ◄──── STARTED ──────  │   it has imported the file of the function  start_timeout_s
     │ ◄──── Outcome ──────  │   the function has returned or raised       timeout_s
     │ ───── Sample ──────►  │
                ⋮

Example with two processes, `timeout_s` = 1 and the samples A, B, C, where B hangs:

    0.0 s   A → process 1, B → process 2
    0.1 s   process 1 returns the outcome of A; C → process 1
    0.2 s   process 1 returns the outcome of C
    1.0 s   the deadline of B is exceeded: process 2 is killed, the outcome of B is TIMED_OUT

Concurrency: `run` is called by one thread at a time. It waits for the pipes of busy processes, and
is unblocked by a message, by the end of a process (its pipe closes) or by the nearest deadline.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Pipe, wait
from types import TracebackType
from typing import Self

from quadriga.errors import ConfigError, WorkerDiedError
from quadriga.rewards.outcome import CRASHED, TIMED_OUT, Outcome, Sample

STARTED = "started"
_START_ATTEMPTS = 3
_EXIT_S = 5.0  # time for a process to exit after it has closed its pipe


class RewardPool:
    """`num_processes` processes that score samples.

    The deadline of a sample, `timeout_s`, begins when its function is called. Starting a process
    and importing the file of a function have their own deadline, `start_timeout_s`. Processes are
    started by the first `run` and are reused for later batches.
    """

    def __init__(
        self, num_processes: int, timeout_s: float = 10.0, start_timeout_s: float = 120.0
    ) -> None:
        if num_processes < 1 or timeout_s <= 0:
            raise ConfigError(
                "a reward pool needs at least 1 process and a deadline above 0 s, "
                f"got {num_processes} processes and {timeout_s} s"
            )
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self._processes: list[_Process] = []
        self._num_processes = num_processes

    def run(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return one outcome per sample, in the order of the samples.

        Raises `WorkerDiedError` if no process can be started.
        """
        outcomes: dict[int, Outcome] = {}
        waiting = deque(enumerate(samples))
        try:
            while len(outcomes) < len(samples):
                self._hand_out(waiting)
                for process in self._ready():
                    number, outcome = process.finish(self.timeout_s, self.start_timeout_s)
                    if outcome is not None:
                        outcomes[number] = outcome
                self._processes = [process for process in self._processes if process.usable]
        except BaseException:
            # Busy processes would send the outcomes of this batch while the next one is scored.
            self.close()
            raise
        return [outcomes[number] for number in range(len(samples))]

    def close(self) -> None:
        """Kill the processes. A later `run` starts new ones."""
        for process in self._processes:
            process.kill()
        self._processes = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _hand_out(self, waiting: deque[tuple[int, Sample]]) -> None:
        """Send waiting samples to idle processes, and start processes up to `num_processes`."""
        idle = [process for process in self._processes if not process.busy]
        while waiting and (idle or len(self._processes) < self._num_processes):
            if not idle:
                idle.append(_start(self.start_timeout_s))
                self._processes.append(idle[-1])
            number, sample = waiting.popleft()
            idle.pop().give(number, sample, self.start_timeout_s)

    def _ready(self) -> list[_Process]:
        """Wait for a message, the end of a process or a deadline; return these processes."""
        busy = [process for process in self._processes if process.busy]
        nearest = min(process.deadline for process in busy)
        # `wait` returns at the first message, so a deadline can pass while another process sends.
        readable = wait([p.connection for p in busy], max(0.0, nearest - time.monotonic()))
        now = time.monotonic()
        return [p for p in busy if p.connection in readable or p.deadline <= now]


class _Process:
    """One process: idle, or busy with sample `number` until `deadline`.

    Attributes:
        called: whether the function of the sample has been called; selects the deadline.
        usable: false once the process is killed.
    """

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "quadriga.rewards.pool_worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # What a function prints goes to standard error: standard output is the run's own.
            stdout=sys.__stderr__ if sys.__stderr__ else subprocess.DEVNULL,
            # The processes score in parallel, so more threads in each would compete for the CPUs.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        # The process holds the only copy of its end now, so its death closes the pipe.
        theirs.close()
        self.busy = False
        self.usable = True
        self.called = False
        self.number = -1
        self.deadline = 0.0

    def give(self, number: int, sample: Sample, start_timeout_s: float) -> None:
        """Send a sample to this idle process."""
        self.number = number
        self.busy = True
        self.called = False
        self.deadline = time.monotonic() + start_timeout_s
        try:
            self.connection.send(sample)
        except (BrokenPipeError, ConnectionResetError):
            return  # the process died while it was idle; `finish` reads the end of its pipe

    def finish(self, timeout_s: float, start_timeout_s: float) -> tuple[int, Outcome | None]:
        """Return (sample number, its outcome), or None as outcome while the function is running."""
        try:
            if self.connection.poll():
                message = self.connection.recv()
                if message == STARTED:
                    self.called = True
                    self.deadline = time.monotonic() + timeout_s
                    return self.number, None
                self.busy = False
                return self.number, message
        except (EOFError, OSError):
            return self.number, self._crashed()
        if time.monotonic() < self.deadline:
            return self.number, None
        self.kill()
        exceeded = f"{timeout_s:g} s" if self.called else f"{start_timeout_s:g} s for its import"
        return self.number, Outcome(TIMED_OUT, detail=f"exceeded its deadline of {exceeded}")

    def _crashed(self) -> Outcome:
        """Return the outcome for a process that has closed its pipe."""
        # The pipe closes a moment before the exit code can be read.
        try:
            code = self.popen.wait(timeout=_EXIT_S)
        except subprocess.TimeoutExpired:
            code = 0
        self.kill()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return Outcome(CRASHED, detail=f"its process ended with {how}")

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self.usable = self.busy = False
        self.popen.kill()
        self.popen.wait()
        self.connection.close()


def _start(start_timeout_s: float) -> _Process:
    """Start a process and wait until it is ready for samples."""
    for _ in range(_START_ATTEMPTS):
        process = _Process()
        try:
            if process.connection.poll(start_timeout_s):
                process.connection.recv()
                return process
        except (EOFError, OSError):
            pass  # it died before it was ready
        process.kill()
    raise WorkerDiedError(
        f"could not start a process for reward functions in {_START_ATTEMPTS} attempts; the last "
        f"process ended with exit code {process.popen.returncode}"
    )
