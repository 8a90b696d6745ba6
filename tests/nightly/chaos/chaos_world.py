"""What all threads share: the worker groups, what was counted, and the judge of errors."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from chaos_cluster import SETTLE_S, wait_until
from chaos_model import Rows, differences
from chaos_workers import ChaosWorker, CoroutineWorker

from processes import is_running
from quadriga import DataProto, errors
from quadriga.protocol import DataProtoFuture
from quadriga.single_controller import Backend, ResourcePool, WorkerGroup

GRACE_S = 10.0
"""No operation may take longer than its deadline and this."""
CALL_S = 40.0
"""The deadline of an ordinary call."""
START_S = 120.0
"""The deadline of the start of a group."""


class StepEnded(Exception):
    """The rest of the step cannot run, because an operation of it failed."""


@dataclass(eq=False)
class Slot:
    """A place for a group that is started again after each kill.

    Attributes:
        nodes: ranks on each node.
    """

    name: str
    cls: type[ChaosWorker]
    nodes: tuple[int, ...]
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


@dataclass(eq=False)
class Generation:
    """One start of the group of a slot. A kill ends it."""

    slot: Slot
    group: WorkerGroup
    pids: list[int]
    watched: bool
    killed: bool = False
    ended_at: float | None = None


@dataclass
class Tracked:
    """A batch, or a future of one, with its expected content.

    Attributes:
        sources: the groups whose death may lose a field of the batch.
    """

    data: DataProto | DataProtoFuture
    rows: Rows
    sources: frozenset[Generation] = frozenset()


@dataclass(frozen=True)
class Expected:
    """The error that an operation must raise: of a slot, and of a rank unless it is None."""

    kind: type[errors.QuadrigaError]
    slot: Slot
    rank: int | None = None


@dataclass
class World:
    """The shared state. Program threads read `Slot.current`; only the fault thread replaces it.

    Attributes:
        counts: operations, faults and explained errors by their names.
        violations: broken invariants, each with the last actions of all threads.
    """

    backend: Backend
    slots: list[Slot] = field(default_factory=list)
    finished: threading.Event = field(default_factory=threading.Event)
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[dict[str, object]] = field(default_factory=list)
    _actions: deque[str] = field(default_factory=lambda: deque(maxlen=40))
    _broken: list[Generation] = field(default_factory=list)
    """Watched generations that were killed. Their death may end any wait of the controller."""

    def action(self, text: str) -> None:
        """Note an action for the report of a later violation. Its first word is counted."""
        self.counts[text.split()[0]] += 1
        self._actions.append(f"{time.monotonic():.2f}s {threading.current_thread().name}: {text}")

    def violation(self, kind: str, message: str) -> None:
        """Record a broken invariant."""
        self.violations.append({"kind": kind, "message": message, "actions": [*self._actions]})

    def repeat(self, step: Callable[[], None], pause_s: float = 0.0) -> None:
        """Run steps until the world is finished. An error outside of an operation is a violation:
        the program is wrong."""
        while not self.finished.wait(pause_s):
            try:
                step()
            except StepEnded:
                continue
            except Exception:
                self.violation("error outside of an operation", traceback.format_exc())

    def start(self, slot: Slot, rng: random.Random) -> None:
        """Start the group of a slot. Half of the groups are watched."""
        with self.operation(f"start {slot.name}", deadline_s=START_S):
            cls = self.backend.class_with_args(slot.cls)
            group = self.backend.worker_group(slot.pool, cls, role=slot.name)
            pids = list(dict.fromkeys(group.pid()))
        watched = self.backend.name != "local" and rng.random() < 0.5
        if watched:
            group.start_worker_aliveness_check()
        slot.current = Generation(slot, group, pids, watched)

    def end(self, generation: Generation) -> None:
        """Shut a group down. Its processes must disappear."""
        slot = generation.slot
        slot.current = None
        with self.operation(f"shutdown {slot.name}", deadline_s=SETTLE_S):
            generation.group.shutdown()
        generation.ended_at = time.monotonic()
        if not wait_until(lambda: not any(map(is_running, generation.pids)), SETTLE_S):
            left = [pid for pid in generation.pids if is_running(pid)]
            self.violation("leaked process", f"rank processes {left} of {slot.name} still run")

    def mark_killed(self, generation: Generation) -> None:
        """Say that errors of this generation are expected from now on."""
        generation.killed = True
        if generation.watched:
            self._broken.append(generation)

    @contextmanager
    def operation(
        self,
        label: str,
        uses: Collection[Generation] = (),
        deadline_s: float = CALL_S,
        expected: Expected | None = None,
    ) -> Iterator[None]:
        """Run an operation that must succeed in time, or raise what is expected.

        `uses`: the groups whose death explains an error. An error that is not expected ends the
        step: StepEnded is raised in its place.
        """
        self.action(label)
        began = time.monotonic()
        try:
            yield
            if expected is not None:
                self.violation("no error", f"expected {expected.kind.__name__}: {label}")
        except StepEnded:
            raise
        except Exception as error:
            error.__traceback__ = None  # its frames hold batches, which must be released
            self.judge(error, label, uses, began, expected)
            if expected is None:
                raise StepEnded(label) from None
        finally:
            if (took := time.monotonic() - began) > deadline_s + GRACE_S:
                self.violation("late", f"{took:.1f} s, deadline {deadline_s:g} s: {label}")

    def judge(
        self,
        error: Exception,
        label: str,
        uses: Collection[Generation],
        began: float,
        expected: Expected | None = None,
    ) -> None:
        """Record a violation unless the error is typed, named, and expected or explained."""
        explained = self._explained(error, began, uses)
        if expected is not None and isinstance(error, expected.kind):
            # Several ranks may be late: those that run calls of other threads are too.
            ranks = {vars(error).get("rank"), *vars(error).get("stacks", ())}
            right = vars(error).get("role") == expected.slot.name and expected.rank in ranks
            kind = "" if expected.rank is None or right else "wrong name"
        elif not isinstance(error, errors.QuadrigaError):
            kind = "untyped error"
        elif missing := unnamed(error, self.slots):
            kind = f"no {missing}"
        elif not explained:
            kind = "unexpected error"
        else:
            kind = "deadline" if isinstance(error, errors.CallTimeoutError) else ""
        if kind:
            self.violation(kind, f"{type(error).__name__}: {error}: {label}")
        else:
            self.counts[type(error).__name__] += 1

    def _explained(self, error: Exception, began: float, uses: Collection[Generation]) -> bool:
        if any(generation.killed for generation in uses):
            return isinstance(error, errors.WorkerError | errors.LostObjectError)
        names = {
            generation.slot.name
            for generation in self._broken
            if generation.ended_at is None or generation.ended_at >= began
        }
        return isinstance(error, errors.WorkerDiedError) and vars(error).get("role") in names

    def wait(self, tracked: Tracked) -> None:
        """Wait for a batch that is a future. Its fields stay where they are."""
        if isinstance(tracked.data, DataProtoFuture):
            with self.operation("get of a future", tracked.sources):
                tracked.data = tracked.data.get()

    def check(self, tracked: Tracked, where: str) -> None:
        """Compare a batch with its expected content."""
        self.wait(tracked)
        with self.operation(f"read {where}", tracked.sources):
            found = differences(tracked.data, tracked.rows)
        if found:
            self.violation("wrong value", f"{'; '.join(found)}: {where}")
            raise StepEnded(where)


def unnamed(error: errors.QuadrigaError, slots: Sequence[Slot]) -> str:
    """Return what an error of a rank does not name: "role", "rank", "method", or ""."""
    if not isinstance(error, errors.WorkerError | errors.LostObjectError):
        return ""
    details = vars(error)
    sizes = {slot.name: slot.size for slot in slots}
    if details.get("role") not in sizes or details["role"] not in str(error):
        return "role"
    if not isinstance(details.get("rank"), int) or details["rank"] >= sizes[details["role"]]:
        return "rank"
    return "" if isinstance(details.get("method"), str) else "method"
