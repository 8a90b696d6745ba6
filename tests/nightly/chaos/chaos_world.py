"""What all threads share: the report, the watchdog, the worker groups, the judge of errors."""

from __future__ import annotations

import faulthandler
import json
import random
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from chaos_cluster import SETTLE_S, is_running, wait_until
from chaos_model import Rows, differences
from chaos_workers import ChaosWorker, CoroutineWorker

from quadriga import DataProto
from quadriga.errors import (
    CallTimeoutError,
    LostObjectError,
    QuadrigaError,
    WorkerDiedError,
    WorkerError,
)
from quadriga.protocol import DataProtoFuture
from quadriga.single_controller import Backend, ResourcePool, WorkerGroup

GRACE_S = 10.0
"""No operation may take longer than its deadline and this."""
LAST_ACTIONS = 40


@dataclass
class Violation:
    """One broken invariant."""

    kind: str
    message: str
    where: str
    at_s: float
    actions: list[str]
    """The last actions of all threads before the violation, oldest first."""


@dataclass(eq=False)
class Operation:
    """One operation of the program that may wait."""

    label: str
    deadline_s: float
    began: float = field(default_factory=time.monotonic)

    @property
    def overdue_s(self) -> float:
        """Seconds beyond the deadline."""
        return time.monotonic() - self.began - self.deadline_s


class Report:
    """Counts of operations, faults, errors and violations. Safe for threads."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.began = time.monotonic()
        self.operations: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.violations: list[Violation] = []
        self.notes: dict[str, object] = {}
        self._actions: deque[str] = deque(maxlen=LAST_ACTIONS)
        self._lock = threading.Lock()

    def action(self, text: str) -> None:
        """Record an action of the program, for the report of a later violation."""
        with self._lock:
            self._actions.append(f"{self.elapsed_s:7.2f}s {text}")

    def done(self, operation: Operation) -> None:
        """Count an operation that returned or raised."""
        with self._lock:
            self.operations[operation.label.split()[0]] += 1

    def count_fault(self, name: str) -> None:
        """Count an injected fault."""
        with self._lock:
            self.faults[name] += 1

    def count_error(self, error: BaseException) -> None:
        """Count an error that a fault explains."""
        with self._lock:
            self.errors[type(error).__name__] += 1

    def violation(self, kind: str, message: str, where: str) -> None:
        """Record a broken invariant."""
        with self._lock:
            found = Violation(kind, message, where, round(self.elapsed_s, 2), list(self._actions))
            self.violations.append(found)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start of the run."""
        return time.monotonic() - self.began

    def as_json(self) -> str:
        """The whole report."""
        with self._lock:
            return json.dumps(
                {
                    "seed": self.seed,
                    "seconds": round(self.elapsed_s, 1),
                    "operations": dict(self.operations),
                    "faults": dict(self.faults),
                    "explained_errors": dict(self.errors),
                    **self.notes,
                    "violations": [asdict(violation) for violation in self.violations],
                },
                indent=1,
            )


class Watchdog:
    """A thread that knows every running operation.

    An operation that exceeds its deadline by more than `grace_s` is a violation of the kind "hang",
    with the stacks of all threads. `on_hang` is called after it, in the watchdog's thread.
    """

    def __init__(
        self, report: Report, on_hang: Callable[[], object], grace_s: float = GRACE_S
    ) -> None:
        self.report = report
        self._on_hang = on_hang
        self._grace_s = grace_s
        self._running: set[Operation] = set()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="chaos-watchdog", daemon=True).start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()

    @contextmanager
    def watch(self, label: str, deadline_s: float) -> Iterator[Operation]:
        """Watch the operation in the `with` block. The first word of `label` is its kind."""
        operation = Operation(label, deadline_s)
        self.report.action(f"[{threading.current_thread().name}] {label}")
        with self._lock:
            self._running.add(operation)
        try:
            yield operation
        finally:
            with self._lock:
                self._running.discard(operation)
            self.report.done(operation)

    def _run(self) -> None:
        while not self._stopped.wait(min(0.25, self._grace_s / 2)):
            with self._lock:
                late = [op for op in self._running if op.overdue_s > self._grace_s]
            if late:
                for operation in late:
                    self._report_hang(operation)
                self._on_hang()
                return

    def _report_hang(self, operation: Operation) -> None:
        message = (
            f"{operation.label}: not finished {operation.overdue_s:.1f} s after its deadline of "
            f"{operation.deadline_s:g} s\n{all_stacks()}"
        )
        self.report.violation("hang", message, operation.label)


def all_stacks() -> str:
    """Return the stacks of all threads of this process."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


CALL_S = 40.0
"""The deadline of an ordinary call."""
START_S = 120.0
"""The deadline of the start of a group."""


class StepEnded(Exception):
    """The rest of the step cannot run, because an operation of it failed."""


@dataclass(eq=False)
class Generation:
    """One start of the group of a slot. A kill ends it."""

    slot: Slot
    group: WorkerGroup
    pids: list[int]
    watched: bool
    killed_at: float | None = None
    ended_at: float | None = None


@dataclass(eq=False)
class Slot:
    """A place for a group that is started again after each kill."""

    name: str
    cls: type[ChaosWorker]
    nodes: tuple[int, ...]
    """Ranks on each node."""
    pool: ResourcePool
    current: Generation | None = None

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(self.nodes)

    @property
    def has_coroutines(self) -> bool:
        """Whether the worker has coroutine methods."""
        return issubclass(self.cls, CoroutineWorker)


@dataclass
class Tracked:
    """A batch, or a future of one, with its expected content."""

    data: DataProto | DataProtoFuture
    rows: Rows
    sources: frozenset[Generation] = frozenset()
    """The groups whose death may lose a field of the batch."""


@dataclass
class World:
    """The shared state. Program threads read `Slot.current`; only the fault thread replaces it."""

    backend: Backend
    watchdog: Watchdog
    report: Report
    slots: list[Slot] = field(default_factory=list)
    finished: threading.Event = field(default_factory=threading.Event)
    _broken: list[Generation] = field(default_factory=list)
    """Watched generations that were killed. Their death may end any wait of the controller."""

    def add_slot(self, name: str, cls: type[ChaosWorker], nodes: tuple[int, ...]) -> Slot:
        """Make a slot without a group."""
        options = {} if self.backend.name == "local" else {"use_gpu": False}
        pool = self.backend.resource_pool(list(nodes), **options)
        slot = Slot(name, cls, nodes, pool)
        self.slots.append(slot)
        return slot

    def start(self, slot: Slot, rng: random.Random) -> Generation:
        """Start the group of a slot. Half of the groups are watched."""
        with self.watchdog.watch(f"start {slot.name}", START_S):
            group = self.backend.worker_group(
                slot.pool, self.backend.class_with_args(slot.cls), role=slot.name
            )
            pids = list(dict.fromkeys(group.pid()))
        watched = self.backend.name != "local" and rng.random() < 0.5
        if watched:
            group.start_worker_aliveness_check()
        slot.current = Generation(slot, group, pids, watched)
        return slot.current

    def end(self, generation: Generation) -> None:
        """Shut a group down. Its processes must disappear."""
        with self.watchdog.watch(f"shutdown {generation.slot.name}", SETTLE_S):
            generation.group.shutdown()
        generation.ended_at = time.monotonic()
        if self.backend.name != "local":
            self.expect_no_process(generation.pids, f"after shutdown of {generation.slot.name}")

    def expect_no_process(self, pids: Sequence[int], where: str) -> None:
        """Record a violation unless the processes end within SETTLE_S seconds."""
        if not wait_until(lambda: not any(map(is_running, pids)), SETTLE_S):
            left = [pid for pid in pids if is_running(pid)]
            self.report.violation("leaked process", f"rank processes {left} still run", where)

    def mark_killed(self, generation: Generation) -> None:
        """Say that errors of this generation are expected from now on."""
        generation.killed_at = time.monotonic()
        if generation.watched:
            self._broken.append(generation)

    @contextmanager
    def operation(
        self, label: str, uses: frozenset[Generation], deadline_s: float = CALL_S
    ) -> Iterator[Operation]:
        """Run an operation that must succeed unless a fault explains its error.

        An error ends the step: StepEnded is raised in its place.
        """
        with self.watchdog.watch(label, deadline_s) as operation:
            try:
                yield operation
            except StepEnded:
                raise
            except Exception as error:
                self.judge(error, operation, uses)
                # Frames of the traceback hold batches, whose references must be released.
                error.__traceback__ = None
                raise StepEnded(label) from None

    def judge(self, error: Exception, operation: Operation, uses: frozenset[Generation]) -> None:
        """Record a violation unless the error is typed, named and explained by a fault."""
        text = f"{type(error).__name__}: {error}"
        if not isinstance(error, QuadrigaError):
            self.report.violation("untyped error", text, operation.label)
        elif missing := unnamed(error, self.slots):
            self.report.violation("unnamed error", f"no {missing} in {text}", operation.label)
        elif isinstance(error, CallTimeoutError) and self._explained(error, operation, uses):
            self.report.violation("deadline instead of an error", text, operation.label)
        elif not self._explained(error, operation, uses):
            self.report.violation("unexpected error", text, operation.label)
        else:
            self.report.count_error(error)

    def _explained(
        self, error: QuadrigaError, operation: Operation, uses: frozenset[Generation]
    ) -> bool:
        if any(generation.killed_at is not None for generation in uses):
            return isinstance(error, WorkerError | LostObjectError)
        names = {
            generation.slot.name
            for generation in self._broken
            if generation.ended_at is None or generation.ended_at >= operation.began
        }
        return isinstance(error, WorkerDiedError) and vars(error).get("role") in names

    def check(self, tracked: Tracked, where: str) -> None:
        """Compare a batch with its expected content."""
        uses = tracked.sources
        with self.operation(f"read {where}", uses):
            data = tracked.data
            if isinstance(data, DataProtoFuture):
                data = tracked.data = data.get()
            found = differences(data, tracked.rows)
        if found:
            self.report.violation("wrong value", "; ".join(found), where)
            raise StepEnded(where)


def unnamed(error: QuadrigaError, slots: Sequence[Slot]) -> str:
    """Return what an error of a rank does not name: "role", "rank", "method", or ""."""
    if not isinstance(error, WorkerError | LostObjectError):
        return ""
    details = vars(error)
    sizes = {slot.name: slot.size for slot in slots}
    if details.get("role") not in sizes:
        return "role"
    if not isinstance(details.get("rank"), int) or details["rank"] >= sizes[details["role"]]:
        return "rank"
    if not isinstance(details.get("method"), str):
        return "method"
    return "" if details["role"] in str(error) else "role in the message"
