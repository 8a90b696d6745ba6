"""Score samples in other processes, with a deadline per sample.

A process scores one sample at a time, so the pool knows which sample a hanging or dead process was
scoring. It kills and replaces that process with everything that it has started, and other samples
are not affected. Of a coroutine function, it scores up to `AT_ONCE` samples at once. If it hangs
then, they are scored again in a thread each; if it hangs in these or dies, one by one. A
`multiprocessing.Pool` cannot do this: it has no deadline per task, and a process that crashes
breaks the pool. The processes run `pool_worker` as a program, so a script that creates a pool needs
no `if __name__ == "__main__"` guard.

The messages between the pool and one process, and the deadline by which each must be received:

    pool                     process
     │ ◄── Report(-1, pid) ────  │   it has imported quadriga                  120 s
     │ ── (number, [Sample]) ──► │
     │ ◄── Report(number, pid) ─ │   it has imported the file of the function  120 s
     │ ◄── … with [Outcome] ──── │   the function has returned or raised       timeout_s
     │ ── (number, [Sample]) ──► │
                  ⋮

Every call has a number that the pool never uses again, and a report is accepted only if it has the
number and the process id that the pool expects. Reports are JSON of bounded length.

Example with two processes, `timeout_s` = 1 and the samples A, B, C, where B hangs:

    0.0 s   A → process 1, B → process 2
    0.1 s   process 1 reports the outcome of A; C → process 1
    0.2 s   process 1 reports the outcome of C
    1.0 s   the deadline of B is exceeded: process 2 is killed, the outcome of B is TIMED_OUT

Concurrency: `run` is called by one thread at a time. It waits for the pipes of busy processes, and
is unblocked by a message, by the end of a process (its pipe closes) or by the nearest deadline.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import Protocol

from pydantic import TypeAdapter

from quadriga.containment import start_program
from quadriga.errors import RewardError, WorkerDiedError
from quadriga.rewards.functions import CRASHED, TIMED_OUT, FunctionRef, Outcome, Sample

_START_S = 120.0  # time to start a process, and to import the file of a function
_CALL_ATTEMPTS = 3  # processes that may end before they call the function of one sample
_KILLED_ATTEMPTS = 2  # calls of the function of one sample whose process SIGKILL ends
_LOST_STARTS = 6  # new processes in a row that may end, or hang, before they call a function


@dataclass(frozen=True)
class Report:
    """A message from a process of the pool: which process, which sample, and its outcome.

    The pool compares `sample` and `process` with the ones that it is waiting for, so that a copy of
    the process that a function has forked cannot report a score for another sample.

    Attributes:
        sample: the number that the pool gave to the samples; -1 when the process is ready.
        outcomes: None when the process is ready, and when the function is about to be called.
    """

    sample: int
    process: int
    outcomes: list[Outcome] | None = None

    def encode(self) -> bytes:
        """Return the message as JSON."""
        outcomes = None if self.outcomes is None else [vars(one) for one in self.outcomes]
        return json.dumps([self.sample, self.process, outcomes]).encode()

    @classmethod
    def decode(cls, message: bytes) -> Report:
        """Return the report of a message. Raises `ValueError` if the message is no report."""
        try:
            return cls(*_FORM.validate_json(message, strict=True))
        except ValueError as error:
            raise ValueError(f"not a report: {' '.join(str(error).split())}") from error


_FORM: TypeAdapter[tuple[int, int, list[Outcome] | None]] = TypeAdapter(
    tuple[int, int, list[Outcome] | None]
)
AT_ONCE = 16
"""Samples of a coroutine function that a process scores at once."""


class RewardPool:
    """`num_processes` processes that score samples.

    The deadline of a sample, `timeout_s`, begins when its function is called. Starting a process
    and importing the file of a function have their own deadline, 120 s. A process and
    each of its children can allocate `memory_gb` GiB; None: no limit. Processes are started by the
    first `run` and are reused for later batches. They end with `close`, when the pool is garbage
    collected, or when the process that created the pool ends, even if it is killed.
    """

    def __init__(
        self,
        num_processes: int,
        timeout_s: float = 10.0,
        memory_gb: float | None = None,
        start: Start | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self._start = start or start_here
        self.memory_gb = memory_gb
        self._num_processes = num_processes
        self._numbers = itertools.count()
        self._processes: list[PoolProcess] = []
        self._lost: Counter[FunctionRef] = Counter()
        weakref.finalize(self, kill_all, self._processes, os.getpid())

    def run(self, samples: Sequence[Sample]) -> list[Outcome]:
        """Return one outcome per sample, in the order of the samples.

        Raises:
            RewardError: a function is never called, because each new process for it ends or hangs.
            WorkerDiedError: no process can be started.
        """
        # Numbers of this batch: 8 calls after 10 others have the numbers 10 … 17.
        calls = {next(self._numbers): rows for rows in self._calls(samples)}
        outcomes: dict[int, Outcome] = {}  # by the position of the sample
        waiting, in_threads = deque(calls), set[int]()
        attempts: Counter[int] = Counter()
        try:
            while len(outcomes) < len(samples):
                self._hand_out(waiting, calls, in_threads, samples)
                for process in self._ready():
                    number = process.number
                    found = process.finish(self.timeout_s)
                    if found is None:
                        continue
                    rows, outcome = calls[number], found[0]
                    self._count_lost(process, samples[rows[0]], outcome)
                    if len(found) < len(rows):  # the process has failed: which sample is to blame?
                        threads = outcome.status == TIMED_OUT and number not in in_threads
                        parts = [rows] if threads else [[row] for row in rows]
                        calls |= (again := {next(self._numbers): part for part in parts})
                        in_threads |= again.keys() if threads else set()
                        waiting.extendleft(again)
                        continue
                    if number in in_threads and TIMED_OUT in {one.status for one in found}:
                        process.kill()  # with the threads that still score
                    if outcome.status == CRASHED and (process.killed or not process.called):
                        # The reason is not of this sample: the system has killed the process (no
                        # memory is left), or it broke before it called the function, by a thread
                        # that the function has left for an earlier sample, for example.
                        attempts[number] += 1
                        most = _KILLED_ATTEMPTS if process.called else _CALL_ATTEMPTS
                        if attempts[number] < most:
                            waiting.appendleft(number)
                            continue
                    outcomes |= zip(rows, found, strict=True)
                self._processes[:] = [process for process in self._processes if process.usable]
        except BaseException:
            # Busy processes would send the outcomes of this batch while the next one is scored.
            self.close()
            raise
        return [outcomes[row] for row in range(len(samples))]

    def _calls(self, samples: Sequence[Sample]) -> Iterator[list[int]]:
        """Yield the positions of the samples that a process scores in one call."""
        at_once = defaultdict[FunctionRef, list[int]](list)
        for row, sample in enumerate(samples):
            if sample.function.form.waits:
                at_once[sample.function].append(row)
            else:
                yield [row]
        for rows in at_once.values():
            size = min(AT_ONCE, -(-len(rows) // self._num_processes))
            yield from (rows[first : first + size] for first in range(0, len(rows), size))

    def close(self) -> None:
        """Kill the processes and what they have started. A later `run` starts new ones."""
        kill_all(self._processes, os.getpid())

    def _count_lost(self, process: PoolProcess, sample: Sample, outcome: Outcome) -> None:
        """Count the new processes in a row that could not call the function of a sample."""
        ref = sample.function
        if process.called:
            self._lost[ref] = 0
        elif process.is_new and outcome.status in (CRASHED, TIMED_OUT):
            self._lost[ref] += 1
        if self._lost[ref] >= _LOST_STARTS:
            raise RewardError(
                f"{_LOST_STARTS} processes in a row could not call {ref.name} of {ref.source}: "
                f"{outcome.detail}. Correct what the file does at its import",
                data_source=sample.data_source,
                status=outcome.status,
            )

    def _hand_out(
        self,
        waiting: deque[int],
        calls: Mapping[int, list[int]],
        in_threads: Set[int],
        samples: Sequence[Sample],
    ) -> None:
        """Send waiting samples to idle processes, and start processes up to `num_processes`."""
        idle = [process for process in self._processes if not process.busy]
        while waiting and (idle or len(self._processes) < self._num_processes):
            if not idle:
                idle.append(PoolProcess(self.memory_gb, start=self._start))
                self._processes.append(idle[-1])
            number = waiting.popleft()
            given = [samples[row] for row in calls[number]]
            idle.pop().give(number, given, self.timeout_s, number in in_threads)

    def _ready(self) -> list[PoolProcess]:
        """Wait for a message, the end of a process or a deadline; return these processes."""
        busy = [process for process in self._processes if process.busy]
        nearest = min(process.deadline for process in busy)
        # `wait` returns at the first message, so a deadline can pass while another process sends.
        readable = wait([p.connection for p in busy], max(0.0, nearest - time.monotonic()))
        now = time.monotonic()
        return [p for p in busy if p.connection in readable or p.deadline <= now]


def kill_all(processes: list[PoolProcess], owner: int) -> None:
    """Kill all processes of a list and empty it. A forked copy of the owner does nothing."""
    if os.getpid() != owner:
        return
    for process in processes:  # all at once: each takes some milliseconds to end
        process.popen.terminate()
    for process in processes:
        process.kill()
    processes.clear()


_EXIT_S = 5.0  # time for a process to exit after it has closed its pipe
_END_S = 7.0  # time for a supervisor to end all its processes
_SEND_S = 30  # time for the process to read more of a sample
_RECEIVE_S = 5  # time for the rest of a report to arrive: other processes wait for it
_LATE_S = 2.0  # time for a process to report samples that have exceeded their deadline
_MAX_REPORT = 1 << 24  # bytes of a report; `functions` bounds its parts to less


class Program(Protocol):
    """A program that was started, as `subprocess.Popen`."""

    pid: int
    returncode: int | None

    def terminate(self) -> None:
        """Ask it to end."""

    def wait(self, timeout: float) -> int:
        """Return its exit code. May raise `subprocess.TimeoutExpired`."""


Start = Callable[[str, list[str]], tuple[Connection, Program]]
"""Starts a module as a program with a connection, whose number is its first argument."""


def start_here(program: str, arguments: list[str]) -> tuple[Connection, Program]:
    """Start a program on this machine."""
    ours, theirs = Pipe()
    popen = start_program(program, theirs.fileno(), arguments)
    # The process holds the only copy of its end now, so its death closes the pipe.
    theirs.close()
    return ours, popen


class PoolProcess:
    """One process: idle, or busy with sample `number` until `deadline`. It is ready for samples.

    Attributes:
        popen: the supervisor; its child scores.
        process: the process id of this child.
        called: whether the function of the sample has been called; selects the deadline.
        is_new: it has called no function yet.
        killed: SIGKILL has ended it, which no error of a function sends.
        usable: false once the process is killed.

    Raises:
        WorkerDiedError: it ended at its start, or was not ready in time.
    """

    def __init__(
        self,
        memory_gb: float | None,
        program: str = "quadriga.rewards.pool_worker",
        start: Start = start_here,
    ) -> None:
        megabytes = round(memory_gb * 1024) if memory_gb else 0
        folders = [os.path.abspath(path) for path in sys.path]
        self.connection, self.popen = start(program, [str(megabytes), *folders])
        # A process that stops reading or writing in the middle of a message must not block the
        # pool: the kernel ends such a call with an error.
        with socket.socket(fileno=os.dup(self.connection.fileno())) as ours:
            limits = {socket.SO_SNDTIMEO: _SEND_S, socket.SO_RCVTIMEO: _RECEIVE_S}
            for option, seconds in limits.items():
                ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))
        self.process = -1
        self.busy = False
        self.usable = True
        self.called = False
        self.is_new = True
        self.killed = False
        self.number = -1
        self._sent: set[FunctionRef] = set()
        self._count = 0  # samples that it was given
        self.deadline = 0.0
        with contextlib.suppress(EOFError, OSError, ValueError):
            if self.connection.poll(_START_S):
                self.process = Report.decode(self.connection.recv_bytes(_MAX_REPORT)).process
                return
        self.kill()
        code = self.popen.returncode
        raise WorkerDiedError(f"a process of {program} ended at its start, exit code {code}")

    def give(
        self, number: int, samples: Sequence[Sample], timeout_s: float, in_threads: bool
    ) -> None:
        """Send samples of one function to this idle process."""
        self.number = number
        self.busy = True
        self.called = False
        self.deadline = time.monotonic() + _START_S
        self._count = len(samples)
        ref = samples[0].function
        bare = [replace(sample, function=replace(ref, content=None)) for sample in samples]
        # The process needs the value of a function once, and it may be large.
        sent = bare if ref in self._sent else [samples[0], *bare[1:]]
        self._sent.add(ref)
        with contextlib.suppress(OSError):
            # An error means that it ended while it was idle: `finish` reads the end of its pipe.
            self.connection.send((number, sent, timeout_s, in_threads))

    def finish(self, timeout_s: float) -> list[Outcome] | None:
        """Return the outcomes of the samples, or one if the process has failed; None while the
        function is running."""
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
        exceeded = f"{timeout_s:g} s" if self.called else f"{_START_S:g} s for its import"
        return self._fail(Outcome(TIMED_OUT, detail=f"exceeded its deadline of {exceeded}"))

    def _accept(self, report: Report, timeout_s: float) -> list[Outcome] | None:
        if (report.sample, report.process) != (self.number, self.process):
            detail = (
                f"its process sent a report for sample {report.sample} of process {report.process}"
                f", expected sample {self.number} of process {self.process}"
            )
            return self._fail(Outcome(CRASHED, detail=detail))
        if report.outcomes is None:
            self.called, self.is_new = True, False
            # Several samples have deadlines of their own in the process.
            self.deadline = time.monotonic() + timeout_s + (_LATE_S if self._count > 1 else 0.0)
            return None
        if len(report.outcomes) != self._count:
            sent = f"its process sent {len(report.outcomes)} outcomes for {self._count} samples"
            return self._fail(Outcome(CRASHED, detail=sent))
        self.busy = False
        return report.outcomes

    def _fail(self, outcome: Outcome) -> list[Outcome]:
        self.kill()
        return [outcome]

    def _ended(self, error: Exception) -> list[Outcome]:
        """Return the outcome for a process that has closed its pipe."""
        # The pipe closes a moment before the exit code can be read.
        try:
            code = self.popen.wait(timeout=_EXIT_S)
            self.killed = code == -signal.SIGKILL
            how = f"ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
        except subprocess.TimeoutExpired:
            how = f"closed its pipe or sent a message that is too long ({type(error).__name__})"
        return self._fail(Outcome(CRASHED, detail=f"its process {how}"))

    def kill(self) -> None:
        """Kill the process with everything that it has started, and wait for its end.

        A process that waits in the kernel, for example for a lost file system, ends later.
        """
        self.usable = self.busy = False
        self.popen.terminate()  # the supervisor kills its child and what that has started
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
