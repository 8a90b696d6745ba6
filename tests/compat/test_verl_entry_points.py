"""What `run_ppo` of verl takes: arguments of Ray, and the runner of a training with its hooks."""

import pytest
import ray
import torch
from omegaconf import OmegaConf

from quadriga.compat.verl.config import number
from quadriga.compat.verl.training import trainer
from quadriga.compat.verl.training.run_settings import need_critic, need_reference_policy
from quadriga.compat.verl.training.trainer import TaskRunner, run_ppo
from quadriga.compat.verl_settings import plain_values
from quadriga.errors import ConfigError
from quadriga.single_controller import Worker


class Started(Exception):
    """The program has reached the start of Ray, with these options."""


@pytest.fixture
def no_ray(monkeypatch):
    """Starting Ray raises `Started`, with the arguments of `ray.init`."""

    def refuse(**options):
        raise Started(options)

    monkeypatch.setattr(trainer, "ensure_ray", refuse)


@pytest.mark.parametrize(
    ("ray_kwargs", "key", "message"),
    [
        (5, "ray_kwargs", "must be a section of settings, got 5"),
        (
            {"ray_init": {"runtime_env": {"env_vars": ["A"]}}},
            "ray_kwargs.ray_init.runtime_env.env_vars",
            r"must be a section of settings, got \['A'\]",
        ),
        ({"ray_init": {"num_cpu": 2}}, "ray_kwargs.ray_init.num_cpu", "Did you mean num_cpus"),
        ({"timeline_json_file": 5}, "ray_kwargs.timeline_json_file", "must be a file name, got 5"),
    ],
)
@pytest.mark.parametrize("kind", [dict, OmegaConf.create])
def test_arguments_of_ray_that_are_wrong_are_named(no_ray, ray_kwargs, key, message, kind):
    with pytest.raises(ConfigError, match=message) as told:
        run_ppo(kind({"ray_kwargs": ray_kwargs}))
    assert told.value.key == key


def test_private_and_absent_arguments_of_ray_are_taken(no_ray):
    for section, expected in (
        ({"ray_kwargs": {"ray_init": {"_temp_dir": "/x", "num_cpus": None}}}, {"_temp_dir": "/x"}),
        ({"ray_init": {"num_cpus": 3, "timeline_json_file": "trace"}}, {"num_cpus": 3}),  # older
        ({"ray_kwargs": None}, {}),
    ):
        with pytest.raises(Started) as told:
            run_ppo(section)
        options = dict(told.value.args[0])
        assert options.pop("runtime_env")["env_vars"]["NCCL_DEBUG"] == "WARN"
        assert options == expected


def test_the_environment_of_ray_leaves_out_what_is_set(monkeypatch):
    for name in trainer.RUNTIME_ENV["env_vars"]:
        monkeypatch.delenv(name, raising=False)
    assert trainer.get_ppo_ray_runtime_env() == trainer.RUNTIME_ENV
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert trainer.ray_settings({})[0]["runtime_env"] == {
        "env_vars": {"TOKENIZERS_PARALLELISM": "true"}
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for strategy, expected in (("fsdp", None), ("megatron", "1")):
        config = {"actor_rollout_ref": {"actor": {"strategy": strategy}}}
        variables = trainer.get_ppo_ray_runtime_env(config)["env_vars"]
        assert variables.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected


def test_a_list_is_no_configuration():
    with pytest.raises(ConfigError, match="expected settings of verl"):
        plain_values(OmegaConf.create([1]))
    with pytest.raises(ConfigError, match="a section of settings with 'adv_estimator', got 'gae'"):
        need_critic({"algorithm": "gae"})
    with pytest.raises(ConfigError, match=r"a section of settings with 'use_kl_loss', got \[1\]"):
        need_reference_policy(OmegaConf.create({"actor_rollout_ref": {"actor": [1]}}))
    with pytest.raises(ConfigError, match="clip_ratio must be a number, got 'wide'"):
        number({"clip_ratio": "wide"}, "clip_ratio")


async def later(self, config):
    """A hook whose body runs only if something awaits it."""


class Later(TaskRunner):
    run = later


def test_a_policy_without_a_class_is_refused():
    class Own(TaskRunner):
        def add_actor_rollout_worker(self, config):
            return Worker, object

    with pytest.raises(
        ConfigError, match=r"has chosen no class .*role_worker_mapping\[Role\.Actor"
    ):
        Own().run({})


def test_what_is_no_runner_is_refused(no_ray):
    for runner in (5, dict):
        with pytest.raises(ConfigError, match="task_runner_class must be a class with a method"):
            run_ppo({}, runner)
    for runner in (Later, ray.remote(Later)):
        with pytest.raises(ConfigError, match=r"Later\.run is a coroutine function"):
            run_ppo({}, runner)
    with pytest.raises(Started):
        run_ppo({}, None)  # verl's default
