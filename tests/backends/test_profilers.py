"""Nsight around ranks, and Ray Client, which is refused."""

import pytest
import ray.util.client
from worker_cases import Adder

from quadriga.backends import get_backend
from quadriga.backends.ray import Nsight, RayWorkerGroup
from quadriga.errors import ConfigError, DispatchError
from quadriga.single_controller import ClassWithInitArgs


@pytest.mark.parametrize(
    ("profiler", "said"),
    [
        (Nsight(ranks=[0, 2, -1]), r"rank\(s\) \[-1, 2\] do not exist in a group of 2"),
        ("nsight", r"expected Nsight\(...\), got 'nsight'"),
    ],
)
def test_a_profiler_that_fits_no_rank_is_refused_before_a_process_starts(
    start_on_ray, profiler, said, monkeypatch
):
    monkeypatch.setattr("quadriga.backends.ray.backend.start_ranks", None)
    with pytest.raises(ConfigError, match=said):
        start_on_ray(Adder, 2, profiler=profiler)
    with pytest.raises(DispatchError, match="ranks that run already, so profiler has no effect"):
        RayWorkerGroup.from_detached(
            worker_names=["a"], ray_cls_with_init=ClassWithInitArgs(Adder), profiler=Nsight()
        )
    with pytest.raises(ConfigError, match=r"flags of nsys .* got 't': 3"):
        Nsight({"t": 3})


def test_nsight_is_an_option_of_the_chosen_actors_beside_the_users_runtime_env(
    start_on_ray, monkeypatch
):
    plans = []

    def start_ranks(given, *args, **options):
        plans.extend(given)
        raise InterruptedError

    monkeypatch.setattr("quadriga.backends.ray.backend.start_ranks", start_ranks)
    flags, mine = {"t": "cuda,nvtx"}, {"env_vars": {"A": "1"}}
    for profiler in (Nsight(flags, ranks=[1]), Nsight()):
        with pytest.raises(InterruptedError):
            start_on_ray(Adder, 2, actor={"runtime_env": mine}, profiler=profiler)
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
