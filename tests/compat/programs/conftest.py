"""One small Ray cluster for all programs, and groups that are ended after the last of them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quadriga.compat.verl  # noqa: F401 - provides the modules of verl


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    import ray

    started = not ray.is_initialized()
    if started:
        ray.init(
            "local", num_cpus=16, include_dashboard=False, object_store_memory=200 * 2**20,
            log_to_driver=False,
        )  # fmt: skip
    yield
    if started:
        ray.shutdown()


class Starter:
    """start(cls, *args, ranks=2, group=RayWorkerGroup, **options) -> a worker group."""

    def __init__(self, pools=""):
        self.started, self.pools = [], pools

    def __call__(self, cls, *args, ranks=2, group=None, **options):
        import ray
        from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

        name = {"name_prefix": self.pools} if self.pools else {}
        pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=1, **name)
        self.started.append(pool)
        held = cls
        if not isinstance(cls, RayClassWithInitArgs):
            held = RayClassWithInitArgs(ray.remote(cls), *args)
        started = (group or RayWorkerGroup)(
            resource_pool=pool, ray_cls_with_init=held, device_name="cpu", use_gpu=False, **options
        )
        self.started.append(started)
        return started

    def end(self):
        for started in reversed(self.started):
            (getattr(started, "shutdown", None) or started.release)()


@pytest.fixture
def start(cluster: None) -> Iterator[Starter]:
    """Starts groups, which end with the test: the tests of all folders may share one cluster."""
    starter = Starter()
    yield starter
    starter.end()


@pytest.fixture(scope="module")
def start_for_module(cluster: None) -> Iterator[Starter]:
    """Starts groups, which end with the module."""
    starter = Starter()
    yield starter
    starter.end()


@pytest.fixture(scope="session")
def calculators(cluster: None) -> Iterator[object]:
    """Two ranks of `Calculator` for all modules: to start a group takes seconds."""
    from program_workers import Calculator

    starter = Starter("shared_calculators")  # a name that lets the pool outlive a module
    yield starter(Calculator)
    starter.end()


@pytest.fixture(scope="session")
def mode_workers() -> Iterator[object]:
    """The module `mode_workers`. The modes that it adds are removed after the last program."""
    from quadriga.single_controller import Dispatch, Execute

    before = {registry: set(registry.names()) for registry in (Dispatch, Execute)}
    import mode_workers

    yield mode_workers
    for registry, names in before.items():
        for name in set(registry.names()) - names:
            registry.remove(name)
    del sys.modules["mode_workers"]


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data and the model of `small_runs`, into which no program writes."""
    from small_runs import make_task

    folder = tmp_path_factory.mktemp("task")
    make_task(folder)
    return folder


@pytest.fixture
def settings(task: Path, tmp_path: Path) -> dict[str, Any]:
    """Settings of verl for a run of one step, which writes into `tmp_path`."""
    from small_runs import verl_settings

    return verl_settings(task, tmp_path)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model."""
    from quadriga.models.tiny import TinyModel, write_tiny_model

    sizes = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2}
    made = str(tmp_path_factory.mktemp("tiny") / "model")
    write_tiny_model(made, ["one two three"], TinyModel(**sizes, intermediate_size=48))
    return made


@pytest.fixture
def judge() -> Iterator[object]:
    """The role `Role.Judge`, which a program has added. Removed after the program."""
    from verl.trainer.ppo.ray_trainer import Role

    from quadriga.trainer.roles import registry

    known = "Judge" in registry._ROLES
    yield Role.add("Judge")
    if not known:
        del registry._ROLES["Judge"]
        del Role.Judge
