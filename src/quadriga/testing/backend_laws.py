"""Laws of backends, checked on two ranks that the backend starts."""

from __future__ import annotations

import pickle
from types import TracebackType
from typing import Any

from quadriga.errors import (
    CallTimeoutError,
    UnregisteredMethodError,
    WorkerDiedError,
    WorkerInitError,
    WorkerMethodError,
)
from quadriga.single_controller import Backend
from quadriga.testing.laws import Law, check_all, expect, expect_raises, law
from quadriga.testing.mode_laws import rows
from quadriga.testing.workers import Probe, Sibling

RANKS = 2
LATE_S = 3.0
"""How long a late call takes: an engine on a busy machine must find it still running."""
POOL = {"use_gpu": False, "max_colocate_count": 1}


class BackendUnderTest:
    """A started group of two ranks with the roles `probe` and `probe_sibling` in each process."""

    def __init__(self, backend: Backend, **pool_options: Any) -> None:
        self.backend = backend
        self.pool_options = {**POOL, **pool_options}
        self._groups: list[Any] = []
        self._pools: list[Any] = []
        roles = {
            "probe": backend.class_with_args(Probe, 10),
            "probe_sibling": backend.class_with_args(Sibling),
        }
        self.group = self.start(backend.colocate(roles))
        views = self.group.spawn(roles)
        self.probe, self.sibling = views["probe"], views["probe_sibling"]

    def start(self, cls: Any) -> Any:
        """Another group, ended with this object."""
        pool = self.backend.resource_pool([RANKS], **self.pool_options)
        self._pools.append(pool)
        self._groups.append(self.backend.worker_group(pool, cls))
        return self._groups[-1]

    def __enter__(self) -> BackendUnderTest:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for group in self._groups:
            group.shutdown()
        for pool in self._pools:
            release = getattr(pool, "release", None)
            if release is not None:
                release()


@law("protocol", "the object offers what `Backend` asks for")
def protocol(subject: BackendUnderTest) -> None:
    expect(isinstance(subject.backend, Backend), True, "isinstance(backend, Backend)")


@law("places", "each rank knows its place, as attributes and as environment variables")
def places(subject: BackendUnderTest) -> None:
    expect(subject.probe.place(), [(r, RANKS, r, RANKS) for r in range(RANKS)], "place()")
    seen = subject.probe.variables()
    address, port = subject.group.master_address, subject.group.master_port
    expect(seen, [(str(r), str(RANKS), address, port) for r in range(RANKS)], "variables()")


@law("modes", "arguments and results go as the dispatch mode says")
def modes(subject: BackendUnderTest) -> None:
    expect(subject.probe.add(5), [15, 16], "ONE_TO_ALL")
    expect(subject.probe.each(["a", [1, 2]]), [(0, "a"), (1, [1, 2])], "ALL_TO_ALL")
    expect(subject.probe.first(), 0, "RANK_ZERO")
    expect(subject.probe.total(rows(4)), [1, 5], "DP_COMPUTE_METRIC")
    expect(_rows(subject.probe.double(rows(4))), [0, 2, 4, 6], "DP_COMPUTE_PROTO")


@law("padding", "padding is added for the call and gone from the result")
def padding(subject: BackendUnderTest) -> None:
    expect(_rows(subject.probe.double(rows(5, padding=True))), [0, 2, 4, 6, 8], "five rows")


@law("mutation", "what a method changes in place stays with its rank")
def mutation(subject: BackendUnderTest) -> None:
    sent = rows(4)
    expect(_rows(subject.probe.spoil(sent)), [1, 2, 3, 4], "one part shared by both ranks")
    expect(_rows(sent), [0, 1, 2, 3], "the caller's batch")
    once = subject.probe.double(sent)
    expect(_rows(subject.probe.double(once)), [0, 4, 8, 12], "a result that was passed on")
    expect(_rows(once), [0, 2, 4, 6], "that result afterwards")


@law("futures", "a result that is not here yet may be passed on, split differently")
def futures(subject: BackendUnderTest) -> None:
    future = subject.probe.double.submit(rows(4))
    expect(_rows(subject.probe.double(future)), [0, 4, 8, 12], "a future as an argument")
    expect(_rows(future.get()), [0, 2, 4, 6], "get() afterwards")


@law("coroutines", "a method may be `async def`")
def coroutines(subject: BackendUnderTest) -> None:
    expect(subject.probe.later(), [0, 1], "later()")


@law("roles", "roles of one process see each other, and names that begin alike are kept apart")
def roles(subject: BackendUnderTest) -> None:
    expect(subject.sibling.ask(5), [15, 16], "a sibling's method")
    expect(subject.group.probe_sibling_ask(5), [15, 16], "by the role in front")
    expect(subject.group.probe_add(5), [15, 16], "by the other role in front")


@law("errors", "a method's error is typed, tells role, rank and method, and the group lives on")
def errors(subject: BackendUnderTest) -> None:
    error = expect_raises(lambda: subject.probe.fail(1), WorkerMethodError, "fail(1)")
    expect((error.role, error.rank, error.method), ("probe", 1, "fail"), "attributes")
    expect("workers.py" in error.remote_traceback, True, "the worker's traceback is there")
    expect(isinstance(error.__cause__, KeyError), True, "the worker's own error is the cause")
    expect(pickle.loads(pickle.dumps(error)).rank, 1, "rank after pickling")
    future = subject.probe.fail.submit(0)
    expect_raises(future.get, WorkerMethodError, "get() of a failed call")
    expect(subject.probe.first(), 0, "the next call")


@law("deadlines", "a call past its deadline is a typed error with the stack of the late rank")
def deadlines(subject: BackendUnderTest) -> None:
    expect(subject.probe.wait.options(timeout=30)(1, 0), [0, 1], "a call in time")
    late = subject.probe.wait.options(timeout=0.2)
    for how, call in (("a call", late), ("a future", lambda *a: late.submit(*a).get())):
        error = expect_raises(lambda call=call: call(1, LATE_S), CallTimeoutError, how)  # type: ignore[misc]
        expect((error.role, error.rank, error.method), ("probe", 1, "wait"), "attributes")
        expect(list(error.stacks), [1], "ranks with a stack")
        expect("in wait" in error.stacks[1], True, "the method is in the stack")
    expect(subject.probe.first(), 0, "the next call")


@law("failed start", "an `__init__` that raises is a typed error")
def failed_start(subject: BackendUnderTest) -> None:
    cls = subject.backend.class_with_args(Probe, -1)
    error = expect_raises(lambda: subject.start(cls), WorkerInitError, "Probe(-1)")
    expect("number must be 0 or more" in str(error), True, "the message has the cause")


@law("names", "a method that is not registered is a typed error with the nearest name")
def names(subject: BackendUnderTest) -> None:
    error = expect_raises(lambda: subject.probe.frist(), UnregisteredMethodError, "frist()")
    expect("first" in str(error), True, "the nearest name is in the message")


@law("end", "a group that was shut down is no longer alive, and says so")
def end(subject: BackendUnderTest) -> None:
    group = subject.start(subject.backend.class_with_args(Probe, 0))
    alive = [group._is_worker_alive(worker) for worker in group.workers]
    expect(alive, [True] * RANKS, "alive before")
    group.shutdown()
    group._block_until_no_worker_alive()
    alive = [group._is_worker_alive(worker) for worker in group.workers]
    expect(alive, [False] * RANKS, "alive after")
    expect_raises(lambda: group.add(0), WorkerDiedError, "a call afterwards")


BACKEND_LAWS: tuple[Law[BackendUnderTest], ...] = (
    protocol,
    places,
    modes,
    padding,
    mutation,
    futures,
    coroutines,
    roles,
    errors,
    deadlines,
    failed_start,
    names,
    end,
)


def check_backend(backend: Backend, **pool_options: Any) -> None:
    """Start two ranks on `backend` and check every law. Raises LawBroken.

    `pool_options` go to `backend.resource_pool`; CPU-only unless they say otherwise.
    """
    with BackendUnderTest(backend, **pool_options) as subject:
        check_all(BACKEND_LAWS, subject, f"The backend {backend.name!r}")


def _rows(batch: Any) -> list[int]:
    seen: list[int] = batch.batch["row"].tolist()
    return seen
