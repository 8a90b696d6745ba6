"""Calls on the workers of one rank, without a backend."""

import asyncio
import os
import sys
import threading

import pytest
import torch

from quadriga.errors import WorkerMethodError
from quadriga.single_controller import ClassWithInitArgs, Dispatch, Worker, register
from quadriga.single_controller.dispatch import BOUNDARY, Call, boundary_for
from quadriga.single_controller.environment import RankEnvironment
from quadriga.single_controller.rank_host import RankHost


class Steps(Worker):
    """Records when each of its methods starts and ends."""

    def __init__(self):
        super().__init__()
        self.running, self.most, self.started = 0, 0, []

    async def step(self, i):
        self.started.append(i)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.2)  # longer than the others need to arrive
        self.running -= 1


def host_of(cls, *args, **options):
    host = RankHost(RankEnvironment(), "node", **options)
    host.build({"role": ClassWithInitArgs(cls, *args)})
    return host


@pytest.mark.parametrize(("limit", "most"), [(None, 6), (2, 2), (1, 1)])
def test_calls_that_wait_for_their_turn_do_not_count_as_running(limit, most):
    """The first call arrives last. With a limit of 1, the others must leave it the slot."""
    host = host_of(Steps, max_concurrency=limit)

    async def calls():
        arrivals = [5, 4, 3, 2, 1, 0]
        tasks = [
            host.invoke_async(lambda i=i: Call("role", "step", (i,)), ("sender", i))
            for i in arrivals
        ]
        await asyncio.wait_for(asyncio.gather(*tasks), timeout=60)

    asyncio.run(calls())
    worker = host.workers["role"]
    assert (worker.most, worker.started) == (most, [0, 1, 2, 3, 4, 5])


class Broken(Worker):
    """Has properties and methods that raise."""

    @property
    def model(self):
        return self.config.model  # no such attribute

    def use_model(self):
        return self.model

    def fail(self, error):
        raise error

    @property
    def method_by_property(self):
        return self.config.method


def test_an_attribute_error_inside_a_property_is_raised_as_it_is():
    with pytest.raises(AttributeError, match="'Broken' object has no attribute 'config'"):
        Broken().model  # noqa: B018
    with pytest.raises(AttributeError, match="'Broken' object has no attribute 'nothing'"):
        Broken().nothing  # noqa: B018
    host = host_of(Broken)
    with pytest.raises(WorkerMethodError, match="no attribute 'config'"):
        host.invoke(Call("role", "use_model"))
    with pytest.raises(WorkerMethodError, match="no attribute 'config'"):
        host.invoke(Call("role", "method_by_property"))
    with pytest.raises(WorkerMethodError, match="has no method 'nothing'"):
        host.invoke(Call("role", "nothing"))


@pytest.mark.parametrize("sequence", [list, tuple])
def test_a_tensor_at_the_end_of_a_long_sequence_is_found(monkeypatch, sequence):
    monkeypatch.delitem(sys.modules, BOUNDARY, raising=False)
    assert boundary_for([sequence([0] * 10_000)]) is None
    assert boundary_for([{"x": sequence([0] * 100 + [torch.zeros(1)])}]) is not None


def test_any_number_of_senders_wait_for_arguments_at_the_same_time():
    """The arguments of each call arrive when all calls wait for theirs."""
    host, barrier = host_of(Steps), threading.Barrier(80)

    def opened():
        barrier.wait(timeout=60)
        return Call("role", "step", (0,))

    async def calls():
        await asyncio.gather(*[host.invoke_async(opened, (f"{i}", 0)) for i in range(80)])

    asyncio.run(calls())
    assert len(host.workers["role"].started) == 80


class Leaving(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def leave_later(self):
        await asyncio.sleep(0)
        sys.exit(3)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def leave(self):
        raise KeyboardInterrupt

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def cancelled(self):
        raise asyncio.CancelledError

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ping(self):
        return 1


def test_sys_exit_in_a_child_that_a_method_has_forked_ends_the_child(monkeypatch):
    host = host_of(Leaving)
    with pytest.raises(WorkerMethodError, match=r"SystemExit in role\.leave_later"):
        host.invoke(Call("role", "leave_later"))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(SystemExit):
        host.invoke(Call("role", "leave_later"))


def test_a_method_that_raises_a_cancellation_fails_by_name():
    with pytest.raises(WorkerMethodError, match=r"CancelledError in role\.cancelled, rank 0"):
        host_of(Leaving).invoke(Call("role", "cancelled"))


@pytest.mark.parametrize(
    ("method", "error"), [("leave_later", "SystemExit"), ("leave", "KeyboardInterrupt")]
)
def test_a_method_that_leaves_the_program_does_not_end_the_event_loop(method, error):
    host = host_of(Leaving)

    async def calls():
        with pytest.raises(
            WorkerMethodError, match=rf"{error} in role\.{method}, rank 0"
        ) as caught:
            await host.invoke_async(lambda: Call("role", method))
        assert caught.value.cause is None
        return await host.invoke_async(lambda: Call("role", "ping"))

    assert asyncio.run(calls()) == 1


class Named(Worker):
    def name(self):
        return type(self).__name__


def test_the_only_role_of_a_process_may_be_called_by_another_name():
    """A group that has attached with another class, or without the role's name."""
    host = host_of(Named)
    assert host.invoke(Call("another", "name")) == "Named"
    both = RankHost(RankEnvironment(), "node")
    both.build({"actor": ClassWithInitArgs(Named), "critic": ClassWithInitArgs(Named)})
    with pytest.raises(WorkerMethodError, match=r"has the roles \['actor', 'critic'\], not 'an"):
        both.invoke(Call("another", "name"))


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def test_an_exception_without_text_does_not_hide_its_traceback():
    with pytest.raises(WorkerMethodError, match=r"Unprintable in role\.fail, rank 0") as caught:
        host_of(Broken).invoke(Call("role", "fail", (Unprintable(),)))
    assert "raise error" in caught.value.remote_traceback
