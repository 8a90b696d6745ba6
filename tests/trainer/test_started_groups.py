"""Worker groups of a run: they are watched, and a start that fails stops what it has started."""

import sys

import pytest

from quadriga.backends import BACKENDS, get_backend
from quadriga.backends.local import LocalBackend
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError, WorkerDiedError, WorkerMethodError
from quadriga.protocol import DataProto
from quadriga.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    ResourcePool,
    Worker,
    WorkerGroup,
    register,
)
from quadriga.single_controller.backend import raise_if_broken
from quadriga.trainer import worker_groups as groups
from quadriga.trainer.roles.registry import ResourcePoolManager, Role
from quadriga.trainer.roles.workers import worker_classes


class Idle(Worker):
    """A worker in place of any role."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None: ...


class Failing(Worker):
    """A worker whose model cannot be loaded."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        raise RuntimeError("no model")


def start(manager: ResourcePoolManager, *overrides: str) -> groups.PPOGroups:
    config = load_config(
        TrainConfig,
        ["trainer.backend=local", "algorithm.adv_estimator=gae", "trainer.call_timeout_s=5",
         *overrides],
    )  # fmt: skip
    return groups.start_groups(
        config, total_steps=1, role_worker_mapping={}, resource_pool_manager=manager
    )


def use_workers(monkeypatch: pytest.MonkeyPatch, critic: type[Worker]) -> None:
    """Start `Idle` for the policy and `critic` for the critic."""
    classes = {"actor_rollout": Idle, "critic": critic}
    built = {key: ClassWithInitArgs(cls) for key, cls in classes.items()}
    monkeypatch.setattr(groups, "worker_classes", lambda *_: built)


def two_pools() -> ResourcePoolManager:
    return ResourcePoolManager(
        {"a": [1], "b": [1]}, {Role.ActorRollout: "a", Role.Critic: "b"}, get_backend("local")
    )


def test_the_death_of_a_process_that_no_call_waits_for_ends_the_run(monkeypatch) -> None:
    monkeypatch.setattr(groups, "ALIVENESS_CHECK_S", 0.05)
    use_workers(monkeypatch, critic=Idle)
    started = start(two_pools())
    try:
        assert len(started.groups) == 2
        for group in started.groups:
            assert group._ranks.watch is not None
        dead = started.critic._ranks
        dead.backend.kill(dead.handles[0])
        dead.watch._thread.join(timeout=10)
        with pytest.raises(WorkerDiedError) as caught:
            started.actor.init_model()
        assert caught.value.role == "critic"
    finally:
        started.close()
    raise_if_broken()


def test_a_start_that_fails_stops_the_groups_that_it_has_started(monkeypatch) -> None:
    stopped: list[WorkerGroup] = []
    original = WorkerGroup.shutdown
    monkeypatch.setattr(
        WorkerGroup, "shutdown", lambda group: (stopped.append(group), original(group))
    )
    use_workers(monkeypatch, critic=Failing)
    with pytest.raises(WorkerMethodError, match="no model"):
        start(two_pools())
    assert [group.roles for group in stopped] == [("actor_rollout",), ("critic",)]


def test_close_stops_every_group_and_the_backend_even_if_one_raises(monkeypatch) -> None:
    stopped: list[str] = []

    def fails_for_the_actor(group: WorkerGroup) -> None:
        stopped.append(group.roles[0])
        if group.roles == ("actor_rollout",):
            raise RuntimeError("no connection")

    use_workers(monkeypatch, critic=Idle)
    started = start(two_pools())
    backend = type(started.backend)
    monkeypatch.setattr(WorkerGroup, "shutdown", fails_for_the_actor)
    monkeypatch.setattr(backend, "shutdown", lambda _: stopped.append("backend"))
    with pytest.raises(RuntimeError, match="no connection"):
        started.close()
    assert stopped == ["actor_rollout", "critic", "backend"]
    monkeypatch.undo()
    started.close()


def test_the_pools_of_a_program_are_released_with_the_run(monkeypatch) -> None:
    in_use: list[tuple[LocalBackend, ResourcePool]] = []

    class Counting(LocalBackend):
        """A backend whose pools are in use until it is shut down."""

        def resource_pool(self, *args, **options) -> ResourcePool:
            pool = super().resource_pool(*args, **options)
            in_use.append((self, pool))
            return pool

        def shutdown(self) -> None:
            in_use[:] = [entry for entry in in_use if entry[0] is not self]

    # Ray makes the pools of a manager without a backend, if a program asks for them itself.
    for name in ("local", "ray"):
        monkeypatch.setitem(BACKENDS, name, f"{__name__}:Counting")
    monkeypatch.setattr(sys.modules[__name__], "Counting", Counting, raising=False)
    use_workers(monkeypatch, critic=Idle)
    manager = ResourcePoolManager({"a": [1], "b": [1]}, {Role.ActorRollout: "a", Role.Critic: "b"})
    for _ in range(2):  # a second run has a backend of its own
        started = start(manager)
        assert len(in_use) == 2
        started.close()
        assert in_use == []


class HalfCritic(Idle):
    """A critic that computes values and cannot be updated."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        return data


def test_a_worker_class_without_a_method_of_its_role_is_named() -> None:
    config = load_config(TrainConfig, ["algorithm.adv_estimator=gae"])
    mapping = {Role.Critic: HalfCritic}
    with pytest.raises(
        ConfigError, match=r"calls .*save_checkpoint, update_critic, but HalfCritic"
    ):
        worker_classes(config, {"critic": ["critic"]}, 1, mapping)
