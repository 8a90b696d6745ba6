"""Runners of verl that add roles: started and called, or refused with what to write instead."""

import json
import os
from pathlib import Path

import pytest
import ray
from judge_workers import STAGE, JudgeConfig, JudgeRunner, JudgeWorker
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role

from processes import run_python
from quadriga.errors import ConfigError
from quadriga.trainer.roles import RoleStage, register_role

HERE = Path(__file__).parent


@pytest.fixture
def own_roles(monkeypatch, judge):
    """The role `Role.Judge`; forgets the roles that a program registers."""
    from quadriga.trainer.roles import registry

    monkeypatch.setattr(registry, "_ADDED", {})
    return judge


@pytest.fixture
def registered(own_roles, settings):
    """Settings of a run with the role of `judge_workers`, registered."""
    register_role(own_roles, worker=JudgeWorker, settings=JudgeConfig, stages=[STAGE])
    return settings


@pytest.fixture
def nothing_starts(monkeypatch):
    """A run that starts worker groups ends with a KeyboardInterrupt."""

    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(RayPPOTrainer, "init_workers", interrupt)


def last_step(folder):
    return json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.nightly
def test_a_role_that_a_runner_places_on_a_pool_of_its_own(cluster, registered, tmp_path):
    registered["judge"] = {"weight": 2.5}
    registered["trainer"]["n_gpus_per_node"] = 2
    run_ppo(registered, task_runner_class=ray.remote(JudgeRunner))
    step = last_step(tmp_path)
    assert (step["judge/weight"], step["judge/ranks"]) == (2.5, 1.0)
    assert step["time/judge.judge"] > 0


class ReferenceRunner(TaskRunner):
    """Places the reference policy on a pool of its own."""

    def add_ref_policy_worker(self, config, ref_policy_cls):
        self.role_worker_mapping[Role.RefPolicy] = ray.remote(ref_policy_cls)
        self.mapping[Role.RefPolicy] = "ref_pool"

    def init_resource_pool_mgr(self, config):
        return ResourcePoolManager({"global_pool": [1], "ref_pool": [1]}, self.mapping)


@pytest.mark.nightly
def test_a_reference_that_a_runner_places_on_a_pool_of_its_own(
    cluster, settings, tmp_path, monkeypatch
):
    settings["actor_rollout_ref"]["actor"]["use_kl_loss"] = True
    groups = []
    start = RayPPOTrainer.init_workers

    def noted(self):
        started = start(self)
        groups.extend(group.roles for group in started.groups if group.roles not in groups)
        return started

    monkeypatch.setattr(RayPPOTrainer, "init_workers", noted)
    ReferenceRunner().run(settings)
    assert groups == [("actor_rollout",), ("ref",)]
    assert "actor/kl_loss" in last_step(tmp_path)


@pytest.mark.nightly
def test_a_role_of_a_script_shares_the_pool_of_the_policy(cluster, settings, tmp_path):
    settings["judge"] = {"weight": 3.5}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    context = ray.get_runtime_context()
    arguments = [context.gcs_address, context.namespace, str(tmp_path / "settings.json")]
    env = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    run = run_python(HERE / "judge_program.py", *arguments, env=env)
    assert "['actor_rollout', 'judge']" in run.stdout
    assert last_step(tmp_path)["judge/weight"] == 3.5


def test_a_role_that_nothing_calls_is_refused(own_roles, settings):
    with pytest.raises(ConfigError, match=r"role judge, but no stage.*register_role\(Role\.Judge"):
        JudgeRunner().run(settings)

    class PoolOnly(TaskRunner):
        def add_judge_resource_pool(self, config):
            self.mapping[Role.Judge] = "global_pool"

    with pytest.raises(ConfigError, match=r"mapping of roles to pools has role judge"):
        PoolOnly().run(settings)
    register_role(own_roles, worker=JudgeWorker, settings=JudgeConfig)
    with pytest.raises(ConfigError, match=r"role judge is registered without stages"):
        JudgeRunner().run(settings)


def test_a_reward_model_is_a_role(own_roles, settings, nothing_starts, capsys):
    class Runner(TaskRunner):
        def add_reward_model_worker(self, config):  # the name of older versions of verl
            self.role_worker_mapping[Role.RewardModel] = ray.remote(JudgeWorker)
            self.mapping[Role.RewardModel] = "global_pool"

    settings["reward_model"] = {"enable": True, "weight": 2.0}
    with pytest.raises(ConfigError, match=r"reward_model\.model\.path= is empty: give the folder"):
        Runner().run(settings)
    del settings["reward_model"]["enable"]
    with pytest.raises(KeyboardInterrupt):  # all checks passed; the role is not used
        Runner().run(settings)
    assert "roles that this run does not use: reward_model" in capsys.readouterr().err
    register_role(Role.RewardModel, settings=JudgeConfig, stages=[STAGE])
    settings["reward_model"]["enable"] = True
    with pytest.raises(KeyboardInterrupt):  # the role of the program, without a model folder
        Runner().run(settings)


def test_the_keys_of_a_roles_section_are_checked(registered):
    registered["judge"] = {"wieght": 2.0}
    with pytest.raises(ConfigError, match=r"judge\.wieght; did you mean judge\.weight\?"):
        JudgeRunner().run(registered)


def test_the_section_of_a_role_that_is_not_registered_is_listed_once(
    own_roles, settings, nothing_starts, capsys
):
    settings["judge"] = {"weight": 2.0}
    settings["reward_model"] = {"enable": False, "input_tokenizer": "x"}
    with pytest.raises(KeyboardInterrupt):
        TaskRunner().run(settings)
    told = capsys.readouterr().err
    assert told.count("judge: weight") == 1
    assert told.count("reward_model: input_tokenizer") == 1


def test_a_pool_without_a_role_is_told_and_left_out(own_roles, settings, nothing_starts, capsys):
    made = []

    class Runner(TaskRunner):
        def init_resource_pool_mgr(self, config):
            made.append(ResourcePoolManager({"global_pool": [1], "reward_pool": [4]}, self.mapping))
            return made[0]

    with pytest.raises(KeyboardInterrupt):
        Runner().run(settings)
    assert capsys.readouterr().err.count("which are not created: reward_pool") == 1
    trainer = RayPPOTrainer(settings, resource_pool_manager=made[0])
    assert dict(trainer.resource_pool_manager.resource_pool_spec) == {"global_pool": [1]}
    trainer.close()


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ({"add_judge_worker": lambda self: None}, r"calls add_judge_worker\(config\), but Own"),
        ({"init_resource_pool_mgr": lambda self, config: None}, "must return a ResourcePoolManag"),
        ({"add_actor_rollout_worker": lambda self, config: None}, "must return \\(class of the p"),
    ],
)
def test_a_hook_that_does_not_fit_is_named(settings, hook, message):
    runner = type("Own", (TaskRunner,), hook)()
    with pytest.raises(ConfigError, match=message):
        runner.run(settings)


def test_a_role_of_another_kind_is_refused(settings):
    class Runner(TaskRunner):
        def add_judge_worker(self, config):
            self.role_worker_mapping["judge"] = JudgeWorker

    with pytest.raises(ConfigError, match=r"has the key 'judge', expected a role"):
        Runner().run(settings)


def test_an_added_hook_is_called_in_its_place(settings, nothing_starts):
    called = []

    class Runner(TaskRunner):
        def add_critic_worker(self, config):
            called.append("critic")

        def add_critic_resource_pool(self, config):
            called.append("own")

        def init_resource_pool_mgr(self, config):
            called.append("pools")
            return super().init_resource_pool_mgr(config)

    with pytest.raises(KeyboardInterrupt):
        Runner().run(settings)
    assert called == ["critic", "own", "pools"]


def test_the_stage_of_a_role_is_checked_before_anything_starts(own_roles, settings):
    stage = RoleStage("judge", reads=("response_mask",), writes=("x",), after="nowhere")
    register_role(own_roles, worker=JudgeWorker, settings=JudgeConfig, stages=[stage])
    with pytest.raises(ConfigError, match=r"stands after 'nowhere', which this run does not have"):
        JudgeRunner().run(settings)
