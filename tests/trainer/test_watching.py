"""A process of a role that no call waits for dies: the run ends with that, not an hour later."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from quadriga.errors import WorkerDiedError
from quadriga.single_controller import ClassWithInitArgs, Dispatch, Worker, register
from quadriga.single_controller.watch import raise_if_broken
from quadriga.trainer import groups
from quadriga.trainer.placement import ResourcePoolManager, Role


class Stand(Worker):
    """In place of a role."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None: ...


def test_every_group_of_a_run_is_watched(monkeypatch) -> None:
    from quadriga.backends import get_backend

    monkeypatch.setattr(groups, "WATCH_S", 0.05)
    monkeypatch.setattr(
        groups, "role_classes", lambda *_: {role: ClassWithInitArgs(Stand) for role in Role.all()}
    )
    config = SimpleNamespace(
        trainer=SimpleNamespace(backend="local", num_cpus=None, call_timeout_s=5.0),
        actor_rollout_ref=SimpleNamespace(actor=SimpleNamespace(reads_full_kl=False)),
    )
    apart = ResourcePoolManager(
        {"a": [1], "b": [1]}, {Role.ActorRollout: "a", Role.Critic: "b"}, get_backend("local")
    )
    started = groups.start_groups(
        config, total_steps=1, use_critic=True, use_reference=False,
        role_worker_mapping={}, resource_pool_manager=apart,
    )  # fmt: skip
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
