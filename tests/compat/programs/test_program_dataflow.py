"""One PPO step with the names of verl and with those of Quadriga: the same numbers."""

import json

import pytest
import ray
import torch
from small_runs import make_task, verl_settings
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role
from verl.workers.fsdp_workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker

from quadriga import TrainConfig, load_config
from quadriga.trainer.main import run_training

RULE = "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return {}\n"


def step_and_files(folder):
    """The metrics of the last step without times, the timed stages, and all weights and states."""
    step = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    timed = ("time/", "perf/", "memory/", "progress/")
    files = {str(file.relative_to(folder)): file for file in folder.rglob("*.safetensors")}
    return (
        {name: value for name, value in step.items() if not name.startswith(timed)},
        {name for name in step if name.startswith("time/")},
        {name: file.read_bytes() for name, file in files.items()},
    )


@pytest.mark.nightly
def test_a_step_of_ppo_has_the_same_numbers_with_both_names(cluster, tmp_path):
    make_task(tmp_path)
    (tmp_path / "rule.py").write_text(RULE.format("len(set(solution_str)) % 5 / 5"))
    settings = verl_settings(tmp_path, tmp_path / "verl")
    base, train = str(tmp_path / "base"), settings["data"]["train_files"]
    optim = {"lr": 1e-3}
    settings["algorithm"] = {"adv_estimator": "gae", "use_kl_in_reward": True}
    settings["critic"] = {"model": {"path": base}, "optim": optim, "ppo_epochs": 2}
    settings["actor_rollout_ref"]["rollout"] = {"name": "hf", "n": 2}
    settings["actor_rollout_ref"]["actor"]["ppo_epochs"] = 2
    settings["custom_reward_function"] = {"path": str(tmp_path / "rule.py"), "name": "score"}
    run_ppo(settings)
    ours = f"""
        data.train_files=[{train}] data.train_batch_size=4
        data.max_response_length=6 reward.path={tmp_path}/rule.py reward.name=score
        actor_rollout_ref.model.path={base} actor_rollout_ref.rollout.n=2
        actor_rollout_ref.actor.optim.lr=1e-3 actor_rollout_ref.actor.ppo_mini_batch_size=4
        actor_rollout_ref.actor.ppo_epochs=2 critic.ppo_epochs=2
        critic.model.path={base} critic.optim.lr=1e-3
        algorithm.adv_estimator=gae algorithm.use_kl_in_reward=true
        trainer.total_training_steps=1 trainer.device=cpu trainer.backend=ray
        trainer.loggers=[jsonl] trainer.default_local_dir={tmp_path}/ours/run"""
    run_training(load_config(TrainConfig, ours.split()))
    of_verl, of_ours = (step_and_files(tmp_path / name / "run") for name in ("verl", "ours"))
    assert of_verl == of_ours
    metrics, stages, files = of_ours
    assert metrics["actor/grad_norm"] > 0 and metrics["critic/grad_norm"] > 0
    assert metrics["reward/max"] > metrics["reward/min"]
    assert {"time/update_actor", "time/update_critic", "time/rollout"} <= stages
    assert {"model/model.safetensors"} < set(files)


class Scores:
    """A reward manager: twice the score of the model; a fixed score where there is none."""

    def __init__(self, num_examine):
        self.num_examine = num_examine

    def __call__(self, data, return_dict=False):
        if "rm_scores" in data.batch:
            return 2 * data.batch["rm_scores"]
        return torch.eye(data.batch["responses"].shape[1])[:1].repeat(len(data), 1)


@pytest.mark.nightly
def test_split_placement_with_a_reward_model(cluster, tmp_path):
    make_task(tmp_path)
    base, scorer = str(tmp_path / "base"), str(tmp_path / "scorer")
    AutoModelForSequenceClassification.from_pretrained(base, num_labels=1).save_pretrained(scorer)
    AutoTokenizer.from_pretrained(base).save_pretrained(scorer)
    settings = verl_settings(tmp_path, tmp_path)
    settings["data"]["val_files"] = settings["data"]["train_files"]
    settings["algorithm"] = {"adv_estimator": "gae", "use_kl_in_reward": True}
    settings["critic"] = {"model": {"path": base}}
    settings["reward_model"] = {"enable": True, "model": {"path": scorer}}
    settings["trainer"]["n_gpus_per_node"] = 3
    workers = {
        Role.ActorRollout: ActorRolloutRefWorker, Role.Critic: CriticWorker,
        Role.RefPolicy: ActorRolloutRefWorker, Role.RewardModel: RewardModelWorker,
    }  # fmt: skip
    names = ("actor_pool", "critic_pool", "ref_pool", "ref_pool")
    trainer = RayPPOTrainer(
        config=settings,
        role_worker_mapping={role: ray.remote(worker) for role, worker in workers.items()},
        resource_pool_manager=ResourcePoolManager(
            {name: [1] for name in names}, dict(zip(workers, names, strict=True))
        ),
        reward_fn=Scores(0),
        val_reward_fn=Scores(1),
    )
    try:
        groups = trainer.init_workers().groups
        trainer.fit()
        roles = {("actor_rollout",), ("critic",), ("ref", "reward_model")}
        assert {group.roles for group in groups} == roles
        assert (trainer.use_rm, trainer.use_critic, trainer.ref_in_actor) == (True, True, False)
    finally:
        trainer.close()
    step, _, _ = step_and_files(tmp_path / "run")
    assert step["reward/mean"] == pytest.approx(2 * step["reward/model"]) != 0
    assert step["val/score"] == 1.0
