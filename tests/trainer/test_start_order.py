"""The order in which the roles of a run load their models."""

from contextlib import closing

import pytest
from run_cases import noted

from quadriga.errors import ConfigError
from quadriga.trainer.roles import AddedRole
from quadriga.trainer.roles.registry import Role, load_train_config
from quadriga.trainer.roles.workers import start_order

JUDGE, MIRROR = Role("Judge", "judge"), Role("Mirror", "mirror")
ALL = {
    "actor": ["actor"],
    "rollout": ["rollout"],
    "ref": ["ref"],
    "critic": ["critic"],
    "mirror": ["mirror"],
    "judge": ["judge"],
    "reward_model": ["reward_model"],
}
SHARED = {"actor_rollout_ref": ["actor", "rollout", "ref"], "critic": ["critic"]}


def role(name: Role, after=(), before=()) -> AddedRole:
    return AddedRole(name, None, None, (), tuple(after), tuple(before), "")


def order(workers, *added: AddedRole) -> list[str]:
    return start_order({**workers, **{one.key: [one.key] for one in added}}, added)


def test_without_declarations_the_actor_comes_last() -> None:
    assert order(ALL, role(MIRROR), role(JUDGE), role(Role.RewardModel)) == [
        "critic", "ref", "reward_model", "mirror", "judge", "rollout", "actor",
    ]  # fmt: skip
    assert order(SHARED) == ["critic", "actor_rollout_ref"]


def test_declarations_come_first() -> None:
    early, late = role(JUDGE, before=[Role.Critic]), role(MIRROR, after=[Role.ActorRollout])
    assert order(SHARED, late, early) == ["judge", "critic", "actor_rollout_ref", "mirror"]
    model, last = role(Role.RewardModel), role(MIRROR, after=[Role.Actor])
    assert order({"critic": ["critic"], "actor": ["actor"]}, last, model, early) == [
        "reward_model", "judge", "critic", "actor", "mirror",
    ]  # fmt: skip
    apart = {"actor": ["actor"], "rollout": ["rollout"]}
    assert order(apart, last) == ["rollout", "actor", "mirror"]
    assert order(apart, role(Role.RewardModel, after=[Role.Actor]))[:2] == ["rollout", "actor"]
    chain = role(MIRROR, after=[JUDGE], before=[Role.RefPolicy])
    assert order({"ref": ["ref"], "actor": ["actor"]}, chain, role(JUDGE)) == [
        "judge", "mirror", "ref", "actor",
    ]  # fmt: skip


def test_a_cycle_is_named_with_the_worker_that_has_several_roles() -> None:
    with pytest.raises(ConfigError, match=r"cycle: (judge|mirror) before (judge|mirror) before"):
        order(SHARED, role(JUDGE, before=[MIRROR]), role(MIRROR, before=[JUDGE]))
    between = role(JUDGE, after=[Role.RefPolicy], before=[Role.Actor])
    assert order({"actor": ["actor"], "ref": ["ref"]}, between) == ["ref", "judge", "actor"]
    with pytest.raises(ConfigError, match=r"cycle: .*actor_rollout_ref before judge"):
        order(SHARED, between)


def test_a_role_that_is_not_registered_is_named() -> None:
    with pytest.raises(ConfigError, match="role judge is to start before or after role mirror"):
        order(SHARED, role(JUDGE, after=[MIRROR]))


LOADS = '''
from quadriga.single_controller import Dispatch, Worker, register
from quadriga.trainer.roles.registry import Role
from quadriga.trainer.roles import register_role

LOADED = []


class Loads(Worker):
    """Notes when it loads its model."""

    def __init__(self, config=None):
        super().__init__()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        LOADED.append(type(self).__name__)


class Early(Loads): ...
class Model(Loads): ...
class Late(Loads): ...


register_role(Role.add("Late"), worker=Late, starts_after=[Role.Actor])
register_role(Role.RewardModel, worker=Model)
register_role(Role.add("Early"), worker=Early, starts_before=[Role.Critic])
'''


def test_a_run_loads_its_models_in_this_order(
    train_overrides, tmp_path, own_roles, monkeypatch
) -> None:
    import sys

    from quadriga.trainer.ppo import RayPPOTrainer
    from quadriga.workers import ActorRolloutRefWorker, CriticWorker

    (tmp_path / "loads.py").write_text(LOADS)
    config = load_train_config([*train_overrides, f"algorithm.user_files=[{tmp_path}/loads.py]",
                                "algorithm.adv_estimator=gae"])  # fmt: skip
    loaded = next(m.LOADED for m in sys.modules.values() if vars(m).get("Early") is not None
                  and hasattr(m, "LOADED"))  # fmt: skip
    for cls in (ActorRolloutRefWorker, CriticWorker):
        noted(monkeypatch, cls, "init_model", lambda self: loaded.append(type(self).__name__))
    trainer = RayPPOTrainer(config)
    with closing(trainer):
        trainer.init_workers()
    assert loaded == ["Model", "Early", "CriticWorker", "ActorRolloutRefWorker", "Late"]
