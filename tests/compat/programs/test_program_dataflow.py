"""One PPO step with the names of verl and with those of Quadriga: the same numbers."""

from __future__ import annotations

import json

import pytest
from small_runs import make_task, verl_settings
from verl.trainer.main_ppo import run_ppo

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
