"""What is special about ranks in the controller's own process."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from worker_cases import Adder, Collective

from quadriga.backends import get_backend, register_backend
from quadriga.errors import CollectiveError, PlacementError, UnknownNameError


def start(cls, ranks, *args, **options):
    backend = get_backend("local")
    return backend.worker_group(
        backend.resource_pool([ranks]), backend.class_with_args(cls, *args), **options
    )


def test_several_local_ranks_hold_no_collectives():
    group = start(Collective, 2)
    with pytest.raises(CollectiveError, match="one local rank, or backend=ray"):
        group.connect()


def test_one_local_rank_does():
    code = (
        "import sys; sys.path.insert(0, 'tests/backends')\n"
        "from test_local import start\n"
        "from worker_cases import Collective\n"
        "group = start(Collective, 1)\n"
        "print(group.connect(), group.reduce_unless(5), 'ray' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.split() == ["[1]", "[1.0]", "False"], run.stderr


def test_methods_run_in_the_calling_thread(monkeypatch):
    """So that a breakpoint in a worker's method stops in the terminal."""
    stopped = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stopped.append(threading.current_thread()))

    class Stops(Adder):
        def add(self, x):
            breakpoint()
            return x

    assert start(Stops, 2).add(1) == [1, 1]
    assert stopped == [threading.current_thread()] * 2


def test_coroutines_inside_a_running_loop():
    import asyncio

    group = start(Adder, 2)

    async def inside():
        return group.later(0.001)

    assert asyncio.run(inside()) == [0, 1]
    assert group.later(0.001) == [0, 1]


def test_a_group_that_was_shut_down():
    group = start(Adder, 2)
    assert [group._is_worker_alive(w) for w in group.workers] == [True, True]
    group.shutdown()
    assert not group._is_worker_alive(group.workers[0])


def test_detached_needs_ray():
    with pytest.raises(PlacementError, match="detached=True needs backend=ray"):
        start(Adder, 1, detached=True)


def test_backends_by_name():
    with pytest.raises(UnknownNameError, match="Did you mean 'local'"):
        get_backend("locl")
    register_backend("mine", "quadriga.backends.local.backend:LocalBackend")
    assert get_backend("mine").name == "local"
