"""A user's file registers a rollout engine, and a run trains with it."""

import json
from pathlib import Path

import pytest

from quadriga import rollout
from quadriga.algorithms import user_files
from quadriga.config.loading import load_config
from quadriga.config.schema import ModelConfig, RolloutEngineConfig, SamplingConfig, TrainConfig
from quadriga.errors import ConfigError, RolloutAbilityError, UnknownNameError
from quadriga.observability.jsonl import read_jsonl
from quadriga.rollout import ROLLOUTS, Rollout, build_rollout, register_rollout, rollout_of
from quadriga.testing import check_rollout
from quadriga.trainer.checks.settings import check_train_settings
from quadriga.trainer.main import run_training

ENGINE = Path(__file__).with_name("third_engine.py")


@pytest.fixture(autouse=True)
def tables(monkeypatch):
    """Forget the engine and the file after the test."""
    monkeypatch.setattr(user_files, "_LOADED", {})
    yield
    for table in (ROLLOUTS, rollout._ORIGINS):
        table.pop("third", None)


def test_an_engine_of_a_file_serves_a_run(model_folder, tmp_path, monkeypatch):
    """The processes of the ranks load the file too, before they build the engine."""
    rows = [{"prompt": "one", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "1"}}]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows * 4))
    rule = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    (tmp_path / "rule.py").write_text(f"{rule}    return len(solution_str) % 3\n")
    settings = [
        f"algorithm.user_files=[{ENGINE}]", "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.name=third", f"actor_rollout_ref.model.path={model_folder}",
        "actor_rollout_ref.rollout.n=2", f"data.train_files=[{data}]", "data.train_batch_size=4",
        "data.max_response_length=4", f"reward.path={tmp_path / 'rule.py'}",
        "trainer.backend=local", "trainer.total_training_steps=2", "trainer.loggers=[jsonl]",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    run_training(load_config(TrainConfig, settings))
    steps = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert len(steps) == 2
    # It samples with the weights that the actor has in each step.
    assert all(step["mismatch/abs"] < 1e-4 for step in steps), steps


def test_it_satisfies_the_laws_that_the_page_names():
    user_files.load_user_file(ENGINE)
    check_rollout(lambda folder: build_rollout("third", ModelConfig(path=folder), dtype="float32"))


def test_what_the_class_declares_is_checked_before_the_start():
    user_files.load_user_file(ENGINE)
    third = rollout_of(RolloutEngineConfig(name="third"))
    third.check_sampling(SamplingConfig(temperature=0.5))
    with pytest.raises(RolloutAbilityError, match="'third' cannot apply top_k=5"):
        third.check_sampling(SamplingConfig(top_k=5))
    settings = "model.path=m", "rollout.name=third", "rollout.replay_routes=true"
    replays = load_config(TrainConfig, [f"actor_rollout_ref.{setting}" for setting in settings])
    with pytest.raises(ConfigError, match=r"replay_routes=true is not built for .*name=third"):
        check_train_settings(replays)
    with pytest.raises(ConfigError, match="'third' has no options"):
        rollout_of(RolloutEngineConfig(name="third", options={"speed": 1})).check(None)
    with pytest.raises(UnknownNameError, match="did you mean 'third'"):
        rollout_of(RolloutEngineConfig(name="thrid"))


def test_a_name_that_is_taken_is_refused():
    with pytest.raises(ConfigError, match="'vllm' is registered by Quadriga"):
        register_rollout("vllm", Rollout)
