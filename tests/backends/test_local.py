"""Ranks in the process of the controller."""

import sys
import threading

import pytest
import torch
from worker_cases import Adder, Cases, Collective, Coroutines

from group_fixtures import local_group as start
from processes import run_python
from quadriga.backends import get_backend
from quadriga.config.schema import ActorConfig, ActorRolloutRefConfig, EngineConfig
from quadriga.errors import (
    CallTimeoutError,
    CollectiveError,
    ConfigError,
    DispatchError,
    PlacementError,
    UnknownNameError,
    WorkerMethodError,
)
from quadriga.parallel.distributed import init_distributed
from quadriga.parallel.model_ranks import model_ranks, shard_meshes
from quadriga.workers import ActorRolloutRefWorker, RankRuntime


def test_several_local_ranks_run_no_collectives():
    group = start(Collective, 2)
    with pytest.raises(CollectiveError, match="one local rank, or backend=ray"):
        group.connect()


@pytest.mark.parametrize(
    "degree",
    ["tensor_parallel_size", "sequence_parallel_size", "context_parallel_size", "fsdp_size"],
)
def test_a_local_rank_does_not_compute_without_the_others(degree):
    init_distributed()  # as a group of one rank has done in this process
    engine = EngineConfig(**{degree: 2})
    config = ActorRolloutRefConfig(actor=ActorConfig(engine=engine))
    with pytest.raises(CollectiveError, match=r"the 2 ranks of a local group .* or backend=ray"):
        start(ActorRolloutRefWorker, 2, config, "actor", RankRuntime(device="cpu"))
    with pytest.raises(ConfigError, match=r"divide the 1 ranks of the worker group"):
        model_ranks(engine, "cpu"), shard_meshes(engine, torch.device("cpu"))


def test_one_local_rank_runs_collectives():
    code = (
        "import sys; sys.path += ['tests', 'tests/backends']\n"
        "from group_fixtures import local_group as start\n"
        "from worker_cases import Collective\n"
        "group = start(Collective, 1)\n"
        "print(group.connect(), group.reduce_unless(5), 'ray' in sys.modules)"
    )
    assert run_python("-c", code).stdout.split() == ["[1]", "[1.0]", "False"]


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

    group = start(Coroutines, 2)

    async def inside():
        return group.later(0.001)

    assert asyncio.run(inside()) == [0, 1]
    assert group.later(0.001) == [0, 1]


def test_a_deadline_does_not_interrupt_the_call_and_is_an_error_with_its_stack(caplog):
    group = start(Cases, 2)
    assert group.sleep.options(timeout=60)(0, 0.01) == [0, 1]
    late = r"^Cases\.sleep exceeded its deadline of 0\.5 s"
    with pytest.raises(CallTimeoutError, match=late) as e:
        group.sleep.options(timeout=0.5)(1, 1.0)
    error = e.value
    assert (error.role, error.rank, error.method) == ("Cases", 1, "sleep")
    assert error.stacks[1].splitlines()[0].endswith("in sleep")
    (said,) = [record.getMessage() for record in caplog.records]
    assert "Cases.sleep on rank 1 exceeded its deadline of 0.5 s" in said


def test_a_deadline_of_the_group_holds_for_futures_and_the_methods_own_error_comes_first():
    group = start(Cases, 1, timeout=0.1)
    with pytest.raises(CallTimeoutError):
        group.sleep.submit(0, 0.2).get()
    with pytest.raises(WorkerMethodError, match="KeyError"):
        group.sleep_and_fail(0.2)
    assert group.sleep.options(timeout=30)(0, 0.2) == [0]


def test_a_call_in_a_debugger_does_not_exceed_its_deadline(caplog):
    group = start(Cases, 1)
    code = compile("def prompt(seconds):\n    import time; time.sleep(seconds)\n", "bdb.py", "exec")
    names: dict = {}
    exec(code, names)
    assert group.run.options(timeout=0.1)(names["prompt"], 0.4) == [None]
    assert not caplog.records


def test_beside_another_group():
    first = start(Adder, 3, 1)
    backend = get_backend("local")
    beside = backend.worker_group(None, backend.class_with_args(Adder, 5), sharing_with=first)
    assert beside.add(0) == [5, 6, 7]
    with pytest.raises(DispatchError, match="needs a resource_pool, or a group to share with"):
        backend.worker_group(None, backend.class_with_args(Adder))


def test_options_of_machines_are_accepted_and_unknown_ones_are_not():
    assert start(Adder, 1, bin_pack=False, device_name="cpu").add(0) == [0]
    with pytest.raises(ConfigError, match="no option 'tiemout'"):
        start(Adder, 1, tiemout=5)
    with pytest.raises(PlacementError, match="detached=True needs backend=ray"):
        start(Adder, 1, detached=True)


def test_backends_by_name():
    with pytest.raises(UnknownNameError, match="did you mean 'local'"):
        get_backend("locl")
    with pytest.raises(ConfigError, match=r"get_backend\('local'\): got an unexpected .*'store'"):
        get_backend("local", store="rows")
