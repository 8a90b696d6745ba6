"""Scoring in processes of their own: a deadline a sample, and crashes contained.

A process takes one sample at a time, so that whatever happens to it is that sample's doing: one
that is late is killed, one that dies is missed, and either is replaced for the next sample.
`multiprocessing` pools cannot do this (one crash ends the pool), nor do they start from a program
without an import guard; these processes start as a module of their own.
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
_END_S = 5.0


class RewardPool:
    """`num_processes` processes that score samples.

    A sample's deadline of `timeout_s` runs from the moment its function is called: starting a
    process and importing the function's file have `start_timeout_s` of their own.
    """

    def __init__(
        self, num_processes: int, timeout_s: float = 10.0, start_timeout_s: float = 120.0
    ) -> None:
        if num_processes < 1 or timeout_s <= 0:
            raise ConfigError(
                "a reward pool needs at least 1 process and a deadline above 0 s, "
                f"got {num_processes} and {timeout_s}"
            )
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self._processes: list[_Process] = []
        self._wanted = num_processes

    def run(self, samples: Sequence[Sample]) -> list[Outcome]:
        """One outcome a sample, in order.

        Raises `WorkerDiedError` when no process can be started at all.
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
            self.close()  # what is left half done must not answer for the next batch
            raise
        return [outcomes[number] for number in range(len(samples))]

    def close(self) -> None:
        """End the processes."""
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
        idle = [process for process in self._processes if not process.busy]
        while waiting and (idle or len(self._processes) < self._wanted):
            if not idle:
                idle.append(_start(self.start_timeout_s))
                self._processes.append(idle[-1])
            number, sample = waiting.popleft()
            idle.pop().give(number, sample, self.start_timeout_s)

    def _ready(self) -> list[_Process]:
        """Waits until a busy process has spoken, died or passed its deadline; returns those."""
        busy = [process for process in self._processes if process.busy]
        nearest = min(process.deadline for process in busy)
        spoken = wait([p.connection for p in busy], max(0.0, nearest - time.monotonic()))
        now = time.monotonic()
        return [p for p in busy if p.connection in spoken or p.deadline <= now]


class _Process:
    """One process: idle, or busy with sample `number` until `deadline`."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "quadriga.rewards.pool_worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__ if sys.__stderr__ else subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self.busy = False
        self.usable = True
        self.called = False
        self.number = -1
        self.deadline = 0.0

    def give(self, number: int, sample: Sample, start_timeout_s: float) -> None:
        self.number = number
        self.busy = True
        self.called = False
        self.deadline = time.monotonic() + start_timeout_s
        try:
            self.connection.send(sample)
        except (BrokenPipeError, ConnectionResetError):
            return  # it died while idle: `finish` will read the end of its pipe

    def finish(self, timeout_s: float, start_timeout_s: float) -> tuple[int, Outcome | None]:
        """The sample's outcome, or None while its function runs within the deadline."""
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
            return self.number, self._gone()
        if time.monotonic() < self.deadline:
            return self.number, None
        self.kill()
        passed = f"{timeout_s:g} s" if self.called else f"{start_timeout_s:g} s to be imported"
        return self.number, Outcome(TIMED_OUT, detail=f"passed its deadline of {passed}")

    def _gone(self) -> Outcome:
        """It closed its pipe; how it ended is known a moment later."""
        try:
            code = self.popen.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            code = 0
        self.kill()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return Outcome(CRASHED, detail=f"its process ended with {how}")

    def kill(self) -> None:
        self.usable = self.busy = False
        self.popen.kill()
        self.popen.wait()
        self.connection.close()


def _start(start_timeout_s: float) -> _Process:
    """A process that has said it is there."""
    for _ in range(_START_ATTEMPTS):
        process = _Process()
        try:
            if process.connection.poll(start_timeout_s):
                process.connection.recv()
                return process
        except (EOFError, OSError):
            pass
        process.kill()
    raise WorkerDiedError(
        f"no process for reward functions could be started in {_START_ATTEMPTS} attempts; the last "
        f"ended with exit code {process.popen.returncode}"
    )
