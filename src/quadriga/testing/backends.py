"""Laws of backends, checked on two ranks that the backend starts."""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TypeVar

import torch

from quadriga.errors import (
    CallTimeoutError,
    ConfigError,
    UnregisteredMethodError,
    WorkerDiedError,
    WorkerError,
    WorkerInitError,
    WorkerMethodError,
)
from quadriga.protocol import DataProto
from quadriga.single_controller import (
    Backend,
    ClassWithInitArgs,
    Dispatch,
    Worker,
    WorkerGroup,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from quadriga.testing import LawBroken, check_all, expect, expect_raises

ValueT = TypeVar("ValueT")
RANKS = 2
LATE_S = 3.0
"""Seconds that a late call takes. A busy machine must still find it running at its deadline."""


class Probe(Worker):
    """One role of the process. It has a number, and a mesh in which all ranks share one part."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        if number < 0:
            raise ConfigError(f"number must be 0 or more, got {number}")
        self.number = number
        self.steps: list[str] = []
        self._register_dispatch_collect_info("all", 0, self.rank == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self) -> tuple[object, ...]:
        """Return the coordinates of the rank, and those in its environment variables."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        own = (self.rank, self.world_size, self.local_rank, self.local_world_size)
        return *own, *(os.environ.get(name, "") for name in names)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, x: int) -> int:
        """Return the sum of the number, x and the rank."""
        return self.number + x + self.rank

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def each(self, x: ValueT) -> tuple[int, ValueT]:
        """Return the rank and its entry of the argument."""
        return self.rank, x

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def first(self) -> int:
        """Return the number of the executing rank, which is 0."""
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def later(self) -> int:
        """Return the rank from a coroutine."""
        await asyncio.sleep(0.001)
        return self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def row_by_row(self, data: DataProto) -> Iterator[DataProto]:
        """Yield the rows one by one, doubled, and record each step."""
        try:
            for i in range(len(data)):
                self.steps.append(f"item {i}")
                yield self.double(data[i : i + 1])
        finally:
            self.steps.append("closed")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_steps(self) -> list[str]:
        """Return what `row_by_row` has recorded, and forget it."""
        steps, self.steps = self.steps, []
        return steps

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, data: DataProto) -> DataProto:
        """Double the rows in place."""
        data.batch["row"] *= 2
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("all"))
    def spoil(self, data: DataProto) -> DataProto:
        """Change the part in place that all ranks share."""
        data.batch["row"] += 1
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def total(self, data: DataProto) -> int:
        """Return the sum of the rows of this rank."""
        return int(data.batch["row"].sum())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, rank: int) -> int:
        """Raise KeyError on one rank."""
        if self.rank == rank:
            raise KeyError("planted")
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait(self, rank: int, seconds: float) -> int:
        """Sleep on one rank."""
        if self.rank == rank:
            time.sleep(seconds)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ask(self, x: int) -> int:
        """Return the result of `add` of the role `probe` in the same process."""
        result: int = self.sibling("probe").add(x)
        return result


def rows(count: int, padding: bool = False) -> DataProto:
    """Return a batch of `count` rows, all different."""
    return DataProto.from_dict(
        tensors={"row": torch.arange(count), "wide": torch.arange(count * 3).reshape(count, 3)},
        non_tensors={"name": [f"row {i}" for i in range(count)]},
        meta_info={"temperature": 0.5},
        auto_padding=padding,
    )


def as_batch(value: object) -> DataProto:
    """Return `value`. Raises `LawBroken` if it is not a `DataProto`."""
    if not isinstance(value, DataProto):
        raise LawBroken(f"expected a DataProto, got {type(value).__name__}")
    return value


class BackendUnderTest(ExitStack):
    """A started group of two ranks with the roles `probe` and `probe_sibling` in each process.

    `pool_options` are passed to `backend.resource_pool`.
    """

    def __init__(self, backend: Backend, **pool_options: object) -> None:
        super().__init__()
        self.backend = backend
        self.pool_options = {"use_gpu": False, "max_colocate_count": 1, **pool_options}
        # One role name is a prefix of the other: "probe_sibling_ask" must not be read as method
        # "sibling_ask" of the role "probe".
        roles = {
            "probe": backend.class_with_args(Probe, 10),
            "probe_sibling": backend.class_with_args(Probe),
        }
        self.group = self.start(backend.colocate(roles))
        views = self.group.spawn(roles)
        self.probe, self.sibling = views["probe"], views["probe_sibling"]

    def start(self, cls: ClassWithInitArgs) -> WorkerGroup:
        """Start another group of two ranks. `__exit__` shuts it down."""
        pool = self.backend.resource_pool([RANKS], **self.pool_options)  # type: ignore[arg-type]
        self.callback(getattr(pool, "release", lambda: None))
        group: WorkerGroup = self.backend.worker_group(pool, cls)
        self.callback(group.shutdown)
        return group


def protocol(subject: BackendUnderTest) -> None:
    """The object implements the `Backend` protocol."""
    expect(isinstance(subject.backend, Backend), True, "isinstance(backend, Backend)")


def places(subject: BackendUnderTest) -> None:
    """Each rank has its coordinates as attributes and as environment variables."""
    address, port = subject.group.master_address, subject.group.master_port
    expected = [(r, RANKS, r, RANKS, str(r), str(RANKS), address, port) for r in range(RANKS)]
    expect(subject.probe.place(), expected, "place()")


def modes(subject: BackendUnderTest) -> None:
    """Arguments are split, padded and joined as the dispatch mode says; methods may be async."""
    probe = subject.probe
    expect(probe.add(5), [15, 16], "ONE_TO_ALL")
    expect(probe.each(["a", [1, 2]]), [(0, "a"), (1, [1, 2])], "ALL_TO_ALL")
    expect(probe.first(), 0, "RANK_ZERO")
    expect(probe.total(rows(4)), [1, 5], "DP_COMPUTE_METRIC")
    expect(_rows(probe.double(rows(4))), [0, 2, 4, 6], "DP_COMPUTE_PROTO")
    expect(_rows(probe.double(rows(5, padding=True))), [0, 2, 4, 6, 8], "five rows")
    expect(probe.later(), [0, 1], "an `async def`")


def mutation(subject: BackendUnderTest) -> None:
    """A change in place by a method is visible on its rank only."""
    # `spoil` adds 1 in place on both ranks, which share one part. A backend that hands the same
    # memory to both ranks would add 2.
    sent = rows(4)
    expect(_rows(subject.probe.spoil(sent)), [1, 2, 3, 4], "one part shared by both ranks")
    expect(_rows(sent), [0, 1, 2, 3], "the caller's batch")
    once = subject.probe.double(sent)
    expect(_rows(subject.probe.double(once)), [0, 4, 8, 12], "a result as an argument")
    expect(_rows(once), [0, 2, 4, 6], "that result afterwards")


def futures(subject: BackendUnderTest) -> None:
    """A future may be an argument before its result is received."""
    # `get` comes last, so that the second call receives a future whose result is still pending.
    future = subject.probe.double.submit(rows(4))
    expect(_rows(subject.probe.double(future)), [0, 4, 8, 12], "a future as an argument")
    expect(_rows(future.get()), [0, 2, 4, 6], "get() afterwards")


def streams(subject: BackendUnderTest) -> None:
    """A generator method gives its items in order, and ends when it is dropped or fails."""
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
    expect(probe.first(), 0, "the next call")


def roles(subject: BackendUnderTest) -> None:
    """Roles of one process can call each other, also if one name begins with the other."""
    expect(subject.sibling.ask(5), [15, 16], "a sibling's method")
    expect(subject.group.probe_sibling_ask(5), [15, 16], "the prefixed method of one role")
    expect(subject.group.probe_add(5), [15, 16], "the prefixed method of the other role")


def errors(subject: BackendUnderTest) -> None:
    """An error is typed, has role, rank and method, and the next call succeeds."""
    error = expect_raises(lambda: subject.probe.fail(1), WorkerMethodError, "fail(1)")
    expect(_where(error), ("probe", 1, "fail"), "attributes")
    expect("backends.py" in vars(error)["remote_traceback"], True, "frames of the worker")
    expect(isinstance(error.__cause__, KeyError), True, "__cause__ is the worker's error")
    expect(pickle.loads(pickle.dumps(error)).rank, 1, "rank after pickling")
    future = subject.probe.fail.submit(0)
    expect_raises(future.get, WorkerMethodError, "get() of a failed call")
    cls = subject.backend.class_with_args(Probe, -1)
    start = expect_raises(lambda: subject.start(cls), WorkerInitError, "Probe(-1)")
    expect("number must be 0 or more" in str(start), True, "the message contains the cause")
    name = expect_raises(lambda: subject.probe.frist(), UnregisteredMethodError, "frist()")
    expect("first" in str(name), True, "the message contains the nearest name")
    expect(subject.probe.first(), 0, "the next call")


def deadlines(subject: BackendUnderTest) -> None:
    """A call that exceeds its deadline raises an error with the stack of the late rank."""
    expect(subject.probe.wait.options(timeout=30)(1, 0), [0, 1], "a call in time")
    late = subject.probe.wait.options(timeout=0.2)
    for wait in (lambda: late(1, LATE_S), lambda: late.submit(1, LATE_S).get()):
        error = expect_raises(wait, CallTimeoutError, "a late call")
        expect(_where(error), ("probe", 1, "wait"), "attributes")
        stacks: dict[int, str] = vars(error)["stacks"]
        expect(list(stacks), [1], "ranks with a stack")
        expect("in wait" in stacks[1], True, "the stack shows the method")
    expect(subject.probe.first(), 0, "the next call")


def end(subject: BackendUnderTest) -> None:
    """The ranks of a group that was shut down are not alive, and calls raise a typed error."""
    group = subject.start(subject.backend.class_with_args(Probe, 0))
    expect([group.is_alive(rank) for rank in range(RANKS)], [True] * RANKS, "alive before")
    group.shutdown()
    group.wait_until_ended()
    expect([group.is_alive(rank) for rank in range(RANKS)], [False] * RANKS, "alive after")
    expect_raises(lambda: group.add(0), WorkerDiedError, "a call afterwards")


BACKEND_LAWS: tuple[Callable[[BackendUnderTest], None], ...] = (
    protocol, places, modes, mutation, futures, streams, roles, errors, deadlines, end,
)  # fmt: skip


def check_backend(backend: Backend, **pool_options: object) -> None:
    """Start two ranks on `backend` and check every law. Raises `LawBroken` if one does not hold.

    `pool_options` are passed to `backend.resource_pool`. The default is a pool without GPUs.
    """
    with BackendUnderTest(backend, **pool_options) as subject:
        check_all(BACKEND_LAWS, subject, f"The backend {backend.name!r}")


def _rows(batch: object) -> list[int]:
    """The field `row` of a batch."""
    seen: list[int] = as_batch(batch).batch["row"].tolist()
    return seen


def _where(error: WorkerError) -> tuple[object, ...]:
    """Role, rank and method of an error."""
    return tuple(vars(error).get(name) for name in ("role", "rank", "method"))
