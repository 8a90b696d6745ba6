"""What all threads share: the worker groups, which of them were killed, the judge of errors."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from chaos_cluster import SETTLE_S, is_running, wait_until
from chaos_model import Rows, differences
from chaos_watch import Operation, Report, Watchdog
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
    pids: set[int] = field(default_factory=set)
    """Process ids of all ranks that were ever started."""
    _broken: list[Generation] = field(default_factory=list)
    """Watched generations that were killed. Their death may end any wait of the controller."""

    def add_slot(self, name: str, cls: type[ChaosWorker], nodes: tuple[int, ...]) -> Slot:
        """Make a slot without a group."""
        pool = self.backend.resource_pool(list(nodes), **self._pool_options)
        slot = Slot(name, cls, nodes, pool)
        self.slots.append(slot)
        return slot

    @property
    def _pool_options(self) -> dict[str, object]:
        return {} if self.backend.name == "local" else {"use_gpu": False}

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
        self.pids.update(pids)
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

    def expect_equal(self, seen: object, expected: object, where: str) -> None:
        """Record a violation unless both are equal."""
        if seen != expected:
            message = f"got {seen!r}, expected {expected!r}"
            self.report.violation("wrong value", message[:2000], where)
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
