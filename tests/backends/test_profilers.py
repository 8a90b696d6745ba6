"""Profilers of ranks, and Ray Client, which is refused."""

from __future__ import annotations

import json

import pytest
import ray.util.client
import torch

from quadriga.backends import get_backend
from quadriga.backends.ray import Nsight, RayWorkerGroup, TorchProfiler
from quadriga.errors import ConfigError, DispatchError, QuadrigaError
from quadriga.single_controller import ClassWithInitArgs, Dispatch, Worker, register


class Multiplier(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def multiply(self, n):
        return float((torch.ones(n, n) @ torch.ones(n, n)).sum())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self):
        return None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self):
        torch.ones(3).sum()
        raise KeyError("planted")


@pytest.fixture
def start_profiled(start_on_ray):
    return lambda profiler, **actor: start_on_ray(
        Multiplier, 2, actor=actor, profiler=profiler, start_timeout=60
    )


def test_traces_of_the_first_calls_of_chosen_methods_on_chosen_ranks(start_profiled, tmp_path):
    methods = ["multiply", "fail"]
    group = start_profiled(TorchProfiler(str(tmp_path / "t"), methods=methods, ranks=[1], calls=2))
    for _ in range(3):
        assert group.multiply(8) == [512.0] * 2
        group.nothing()
    names = [f"Multiplier.multiply-rank1-{number}.json" for number in range(2)]
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == names
    events = json.loads((tmp_path / "t" / names[0]).read_text())["traceEvents"]
    assert any("aten::mm" in event.get("name", "") for event in events)
    with pytest.raises(QuadrigaError, match=r"KeyError in Multiplier.fail"):
        group.fail()  # as without a profiler
    assert group.multiply(2) == [8.0] * 2


@pytest.mark.parametrize(
    ("profiler", "said"),
    [
        (TorchProfiler("/t", ranks=[0, 2]), r"rank\(s\) \[2\] do not exist in a group of 2"),
        (TorchProfiler("/t", methods=["multiplies"]), r"no method \['multiplies'\]; it has .*mult"),
        (Nsight(ranks=[-1]), r"rank\(s\) \[-1\] do not exist"),
        ("nsight", r"expected Nsight\(...\) or TorchProfiler\(...\), got 'nsight'"),
    ],
)
def test_a_profiler_that_fits_no_rank_is_refused_before_a_process_starts(
    start_profiled, profiler, said, monkeypatch
):
    monkeypatch.setattr("quadriga.backends.ray.backend.start_ranks", None)
    with pytest.raises(ConfigError, match=said):
        start_profiled(profiler)


class Generator(Multiplier):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def generate(self):
        return None


def test_a_profiler_that_would_trace_nothing_is_refused(start_on_ray, monkeypatch):
    monkeypatch.setattr("quadriga.backends.ray.backend.start_ranks", None)
    with pytest.raises(ConfigError, match=r"coroutine methods \['generate'\], whose calls overlap"):
        start_on_ray(Generator, 2, profiler=TorchProfiler("/t"))
    with pytest.raises(DispatchError, match="ranks that run already, so profiler has no effect"):
        RayWorkerGroup.from_detached(
            worker_names=["a"],
            ray_cls_with_init=ClassWithInitArgs(Multiplier),
            profiler=TorchProfiler("/t"),
        )


def test_values_of_profilers_are_checked():
    with pytest.raises(ConfigError, match=r"flags of nsys .* got 't': 3"):
        Nsight({"t": 3})
    for arguments in (("",), ("/t", None, None, 0)):
        with pytest.raises(ConfigError, match="TorchProfiler needs a folder and calls"):
            TorchProfiler(*arguments)


def test_nsight_is_an_option_of_the_chosen_actors_beside_the_users_runtime_env(
    start_profiled, monkeypatch
):
    plans = []

    def start_ranks(given, *args, **options):
        plans.extend(given)
        raise InterruptedError

    monkeypatch.setattr("quadriga.backends.ray.backend.start_ranks", start_ranks)
    flags = {"t": "cuda,nvtx"}
    for profiler in (Nsight(flags, ranks=[1]), Nsight()):
        with pytest.raises(InterruptedError):
            start_profiled(profiler, runtime_env={"env_vars": {"A": "1"}})
    mine = {"env_vars": {"A": "1"}}
    assert [plan.options["runtime_env"] for plan in plans] == [
        mine, {**mine, "nsight": flags}, *[{**mine, "nsight": "default"}] * 2,
    ]  # fmt: skip


def test_ray_client_is_refused(monkeypatch):
    backend = get_backend("ray")
    with pytest.raises(ConfigError, match=r"Ray Client \(ray://\) is not supported.*ray://head"):
        backend.start(address="ray://head:10001")
    monkeypatch.setenv("RAY_ADDRESS", "ray://other:10001")
    with pytest.raises(ConfigError, match="ray://other"):
        backend.start()
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(ray.util.client.ray, "is_connected", lambda: True)
    for start in (backend.start, RayWorkerGroup):
        with pytest.raises(ConfigError, match="Got a connected client"):
            start()
