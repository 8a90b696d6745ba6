"""What a run records, and the watchdog that ends a run whose operation does not return."""

from __future__ import annotations

import faulthandler
import json
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

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
        self.longest_wait_s: dict[str, float] = {}
        self.notes: dict[str, object] = {}
        self._actions: deque[str] = deque(maxlen=LAST_ACTIONS)
        self._lock = threading.Lock()

    def action(self, text: str) -> None:
        """Record an action of the program, for the report of a later violation."""
        with self._lock:
            self._actions.append(f"{self.elapsed_s:7.2f}s {text}")

    def done(self, operation: Operation) -> None:
        """Count an operation that returned or raised."""
        kind, waited = operation.label.split()[0], time.monotonic() - operation.began
        with self._lock:
            self.operations[kind] += 1
            self.longest_wait_s[kind] = max(self.longest_wait_s.get(kind, 0.0), round(waited, 3))

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

    @property
    def progress(self) -> str:
        """One line for the terminal."""
        total = sum(self.operations.values())
        longest = max(self.longest_wait_s.values(), default=0.0)
        return (
            f"{self.elapsed_s:6.0f} s  {total} operations  {sum(self.faults.values())} faults  "
            f"{sum(self.errors.values())} explained errors  {len(self.violations)} violations  "
            f"longest operation {longest:.1f} s"
        )

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
                    "longest_operation_s": self.longest_wait_s,
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
