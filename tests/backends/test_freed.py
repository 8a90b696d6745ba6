"""What a call has received and returned is freed when it ends, also after a failure.

A cycle would keep it until the next full garbage collection, which a process that waits for work
does not run: an exception refers to its traceback, the traceback to the frames, and a variable of a
frame to the exception. All tests run with the garbage collector off, in the controller and in the
ranks.
"""

import asyncio
import gc
import time
from collections import Counter
from contextlib import contextmanager, suppress

import pytest
import torch

from group_fixtures import Starter
from quadriga.errors import QuadrigaError
from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, Worker, register

KEPT = ("Call", "DataProto", "DataProtoFuture", "RayBatch", "RayPending", "Location")


def kept() -> Counter[str]:
    """Return how many objects of a call exist in this process."""
    names = (type(found).__name__ for found in gc.get_objects())
    return Counter(name for name in names if name in KEPT)


class Keeping(Worker):
    """Methods that return late, fail, or stop."""

    def __init__(self) -> None:
        super().__init__()
        gc.disable()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows(self, data, seconds=0.0, fails=False):
        time.sleep(seconds)
        if fails:
            raise KeyError("reward_model")
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def cannot_be_pickled(self, data):
        return (x for x in ())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def parts(self, data, fails):
        yield data
        if fails:
            raise KeyError("reward_model")
        yield data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def relay(self, group, data):
        return group.rows.options(timeout=30)(data, seconds=0.5)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def kept(self):
        return kept()


class KeepingLater(Keeping):
    """The same on an event loop."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def rows_later(self, data, seconds=0.0, fails=False):
        await asyncio.sleep(seconds)
        if fails:
            raise KeyError("reward_model")
        return data


def too_late(group, other):
    future = other.rows.submit(batch(), seconds=1.5)
    group.rows.options(timeout=0.3)(future)


def cancelled(group, other):
    future = other.rows.submit(batch(), seconds=1.0)
    waiting = group.rows.submit(future)
    time.sleep(0.5)
    waiting.cancel()


PROGRAMS = {
    "failed": lambda a, b: a.rows(b.rows.submit(batch(), seconds=0.5, fails=True)),
    # An argument arrives after the first attempt to read it.
    "late": lambda a, b: a.rows(b.rows.submit(batch(), seconds=0.5)),
    "too late": too_late,
    "cancelled": cancelled,
    "cannot be pickled": lambda a, b: a.cannot_be_pickled(batch()),
    "failed in a stream": lambda a, b: list(a.parts.stream(batch(), fails=True)),
    "relayed": lambda a, b: a.relay(b, batch()),
}


def batch() -> DataProto:
    """Rows that are sent by reference."""
    return DataProto.from_dict({"a": torch.ones(4, 100_000)})


@pytest.fixture(
    scope="module", params=[Keeping, pytest.param(KeepingLater, marks=pytest.mark.nightly)]
)
def groups(request, ray_backend):
    start = Starter(ray_backend)
    yield start(request.param, 1), start(Keeping, 1)
    start.end()


@contextmanager
def no_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def soon(read, expected):
    """Return what `read` returns, once it is `expected`: Ray frees references a bit later."""
    deadline = time.monotonic() + 60
    while (found := read()) != expected and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


@pytest.mark.parametrize(
    "program", [pytest.param(n, marks=[pytest.mark.nightly][: n != "failed"]) for n in PROGRAMS]
)
def test_nothing_of_a_call_is_kept(groups, program):
    group, other = groups
    in_ranks = [made.kept() for made in groups]  # the call of `kept` itself
    with no_collector():
        before = kept()
        with suppress(QuadrigaError):
            PROGRAMS[program](group, other)
        assert soon(kept, before) == before
    for made, expected in zip(groups, in_ranks, strict=True):
        assert soon(made.kept, expected) == expected
