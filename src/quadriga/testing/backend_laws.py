"""Laws of backends, checked on two ranks that the backend starts."""

from __future__ import annotations

import pickle
from contextlib import ExitStack
from types import TracebackType
from typing import TypedDict, Unpack

from quadriga.errors import (
    CallTimeoutError,
    LengthError,
    UnregisteredMethodError,
    WorkerDiedError,
    WorkerError,
    WorkerInitError,
    WorkerMethodError,
)
from quadriga.single_controller import Backend, ClassWithInitArgs, ResourcePool, WorkerGroup
from quadriga.testing.laws import Law, check_all, expect, expect_raises, law
from quadriga.testing.mode_laws import as_batch, rows
from quadriga.testing.workers import Probe, Sibling

RANKS = 2
LATE_S = 3.0
"""Seconds that a late call takes. A busy machine must still find it running at its deadline."""


class PoolOptions(TypedDict, total=False):
    """Options of `Backend.resource_pool` for the pools of the check."""

    use_gpu: bool
    max_colocate_count: int
    accelerator_type: str


class BackendUnderTest:
    """A started group of two ranks with the roles `probe` and `probe_sibling` in each process."""

    def __init__(self, backend: Backend, **pool_options: Unpack[PoolOptions]) -> None:
        self.backend = backend
        self.pool_options: PoolOptions = {"use_gpu": False, "max_colocate_count": 1}
        self.pool_options.update(pool_options)
        self._groups: list[WorkerGroup] = []
        self._pools: list[ResourcePool] = []
        # One role name is a prefix of the other: "probe_sibling_ask" must not be read as method
        # "sibling_ask" of the role "probe".
        roles = {
            "probe": backend.class_with_args(Probe, 10),
            "probe_sibling": backend.class_with_args(Sibling),
        }
        self.group = self.start(backend.colocate(roles))
        views = self.group.spawn(roles)
        self.probe, self.sibling = views["probe"], views["probe_sibling"]

    def start(self, cls: ClassWithInitArgs) -> WorkerGroup:
        """Start another group of two ranks. `__exit__` shuts it down."""
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
        with ExitStack() as stack:  # all are ended before an error of one is raised
            for pool in self._pools:
                release = getattr(pool, "release", None)
                if release is not None:
                    stack.callback(release)
            for group in self._groups:
                stack.callback(group.shutdown)


@law("protocol", "the object implements the `Backend` protocol")
def protocol(subject: BackendUnderTest) -> None:
    expect(isinstance(subject.backend, Backend), True, "isinstance(backend, Backend)")


@law("places", "each rank has its coordinates as attributes and as environment variables")
def places(subject: BackendUnderTest) -> None:
    expect(subject.probe.place(), [(r, RANKS, r, RANKS) for r in range(RANKS)], "place()")
    seen = subject.probe.variables()
    address, port = subject.group.master_address, subject.group.master_port
    expect(seen, [(str(r), str(RANKS), address, port) for r in range(RANKS)], "variables()")


@law("modes", "arguments are split and results are joined as the dispatch mode says")
def modes(subject: BackendUnderTest) -> None:
    expect(subject.probe.add(5), [15, 16], "ONE_TO_ALL")
    expect(subject.probe.each(["a", [1, 2]]), [(0, "a"), (1, [1, 2])], "ALL_TO_ALL")
    expect(subject.probe.first(), 0, "RANK_ZERO")
    expect(subject.probe.total(rows(4)), [1, 5], "DP_COMPUTE_METRIC")
    expect(_rows(subject.probe.double(rows(4))), [0, 2, 4, 6], "DP_COMPUTE_PROTO")


@law("padding", "padding is added for the call and removed from the result")
def padding(subject: BackendUnderTest) -> None:
    expect(_rows(subject.probe.double(rows(5, padding=True))), [0, 2, 4, 6, 8], "five rows")


@law("mutation", "a change in place by a method is visible on its rank only")
def mutation(subject: BackendUnderTest) -> None:
    # `spoil` adds 1 in place on both ranks, which share one part. A backend that hands the same
    # memory to both ranks would add 2.
    sent = rows(4)
    expect(_rows(subject.probe.spoil(sent)), [1, 2, 3, 4], "one part shared by both ranks")
    expect(_rows(sent), [0, 1, 2, 3], "the caller's batch")
    once = subject.probe.double(sent)
    expect(_rows(subject.probe.double(once)), [0, 4, 8, 12], "a result as an argument")
    expect(_rows(once), [0, 2, 4, 6], "that result afterwards")


@law("futures", "a future may be an argument before its result is received")
def futures(subject: BackendUnderTest) -> None:
    # `get` comes last, so that the second call receives a future whose result is still pending.
    future = subject.probe.double.submit(rows(4))
    expect(_rows(subject.probe.double(future)), [0, 4, 8, 12], "a future as an argument")
    expect(_rows(future.get()), [0, 2, 4, 6], "get() afterwards")


@law(
    "streams",
    "a generator method gives its items in order, is at most one item ahead, and ends when it is "
    "dropped or fails",
)
def streams(subject: BackendUnderTest) -> None:
    probe = subject.probe
    probe.take_steps()
    items = [_rows(item) for item in probe.row_by_row.stream(rows(4))]
    expect(items, [[0, 4], [2, 6]], "item i is item i of every rank, joined")
    expect(probe.take_steps(), [["item 0", "item 1", "closed"]] * RANKS, "steps of the ranks")
    dropped = probe.row_by_row.stream(rows(8))
    expect(_rows(next(dropped)), [0, 8], "the first item")
    expect(probe.first(), 0, "a call between two items")
    dropped.close()
    expect(probe.take_steps(), [["item 0", "item 1", "closed"]] * RANKS, "after it was dropped")
    unordered = list(probe.up_to.stream_unordered([3, 1]))
    expect([item for rank, item in unordered if rank == 0], [0, 1, 2], "items of rank 0")
    expect([item for rank, item in unordered if rank == 1], [10], "items of rank 1")
    uneven = probe.up_to.stream([2, 1])
    expect(next(uneven), [0, 10], "the first item of uneven ranks")
    expect_raises(lambda: next(uneven), LengthError, "the second, which one rank does not have")
    failing = probe.fail_after.stream(1)
    expect(next(failing), [0, 0], "the item before a failure")
    error = expect_raises(lambda: next(failing), WorkerMethodError, "the item that fails")
    expect(_where(error), ("probe", 1, "fail_after"), "attributes")
    expect(probe.first(), 0, "the next call")


@law("coroutines", "a method may be an `async def`")
def coroutines(subject: BackendUnderTest) -> None:
    expect(subject.probe.later(), [0, 1], "later()")


@law("roles", "roles of one process can call each other, also if one name begins with the other")
def roles(subject: BackendUnderTest) -> None:
    expect(subject.sibling.ask(5), [15, 16], "a sibling's method")
    expect(subject.group.probe_sibling_ask(5), [15, 16], "the prefixed method of one role")
    expect(subject.group.probe_add(5), [15, 16], "the prefixed method of the other role")


@law(
    "errors", "an error of a method is typed, has role, rank and method, and the next call succeeds"
)
def errors(subject: BackendUnderTest) -> None:
    error = expect_raises(lambda: subject.probe.fail(1), WorkerMethodError, "fail(1)")
    expect(_where(error), ("probe", 1, "fail"), "attributes")
    expect(
        "workers.py" in vars(error)["remote_traceback"],
        True,
        "remote_traceback has the worker's frames",
    )
    expect(isinstance(error.__cause__, KeyError), True, "__cause__ is the worker's error")
    expect(pickle.loads(pickle.dumps(error)).rank, 1, "rank after pickling")
    future = subject.probe.fail.submit(0)
    expect_raises(future.get, WorkerMethodError, "get() of a failed call")
    expect(subject.probe.first(), 0, "the next call")


@law(
    "deadlines", "a call that exceeds its deadline raises an error with the stack of the late rank"
)
def deadlines(subject: BackendUnderTest) -> None:
    expect(subject.probe.wait.options(timeout=30)(1, 0), [0, 1], "a call in time")
    late = subject.probe.wait.options(timeout=0.2)
    waits = {
        "a call": lambda: late(1, LATE_S),
        "a future": lambda: late.submit(1, LATE_S).get(),
    }
    for how, wait in waits.items():
        error = expect_raises(wait, CallTimeoutError, how)
        expect(_where(error), ("probe", 1, "wait"), "attributes")
        stacks: dict[int, str] = vars(error)["stacks"]
        expect(list(stacks), [1], "ranks with a stack")
        expect("in wait" in stacks[1], True, "the stack shows the method")
    expect(subject.probe.first(), 0, "the next call")


@law("failed start", "an error in `__init__` of a worker is a typed error")
def failed_start(subject: BackendUnderTest) -> None:
    cls = subject.backend.class_with_args(Probe, -1)
    error = expect_raises(lambda: subject.start(cls), WorkerInitError, "Probe(-1)")
    expect("number must be 0 or more" in str(error), True, "the message contains the cause")


@law("names", "a call of a method that is not registered raises an error with the nearest name")
def names(subject: BackendUnderTest) -> None:
    error = expect_raises(lambda: subject.probe.frist(), UnregisteredMethodError, "frist()")
    expect("first" in str(error), True, "the message contains the nearest name")


@law("end", "the ranks of a group that was shut down are not alive, and calls raise a typed error")
def end(subject: BackendUnderTest) -> None:
    group = subject.start(subject.backend.class_with_args(Probe, 0))
    alive = [group.is_alive(rank) for rank in range(group.world_size)]
    expect(alive, [True] * RANKS, "alive before")
    group.shutdown()
    # A process needs some time to end.
    group.wait_until_ended()
    alive = [group.is_alive(rank) for rank in range(group.world_size)]
    expect(alive, [False] * RANKS, "alive after")
    expect_raises(lambda: group.add(0), WorkerDiedError, "a call afterwards")


BACKEND_LAWS: tuple[Law[BackendUnderTest], ...] = (
    protocol,
    places,
    modes,
    padding,
    mutation,
    futures,
    streams,
    coroutines,
    roles,
    errors,
    deadlines,
    failed_start,
    names,
    end,
)


def check_backend(backend: Backend, **pool_options: Unpack[PoolOptions]) -> None:
    """Start two ranks on `backend` and check every law. Raises `LawBroken` if one does not hold.

    `pool_options` are passed to `backend.resource_pool`. The default is a pool without GPUs.
    """
    with BackendUnderTest(backend, **pool_options) as subject:
        check_all(BACKEND_LAWS, subject, f"The backend {backend.name!r}")


def _rows(batch: object) -> list[int]:
    """The field `row` of a batch."""
    seen: list[int] = as_batch(batch).batch["row"].tolist()
    return seen


def _where(error: WorkerError) -> tuple[object, object, object]:
    """Role, rank and method of an error."""
    details = vars(error)
    return details.get("role"), details.get("rank"), details.get("method")
