"""The examples in examples/trainer run and compute the same on both backends."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from quadriga.containment import import_file
from quadriga.observability.jsonl import read_jsonl, read_samples
from quadriga.rewards.judges import last_number
from quadriga.trainer.main import run_training
from quadriga.trainer.roles.registry import load_train_config

FOLDER = Path(__file__).parents[2] / "examples" / "trainer"


@pytest.fixture
def reward_model(own_roles):
    return import_file(FOLDER / "reward_model.py", "example")


def test_a_model_of_its_own_role_judges_the_responses(reward_model, tmp_path):
    reward_model.make_task(tmp_path)
    config = load_train_config([
        f"algorithm.user_files=[{FOLDER / 'local_judge.py'}]", "trainer.backend=local",
        f"judge.model_path={tmp_path}/policy", f"judge.policy_path={tmp_path}/policy",
        "judge.prompt='{question}{response}'", "judge.max_tokens=16",
        f"actor_rollout_ref.model.path={tmp_path}/policy", "algorithm.adv_estimator=grpo",
        f"data.train_files=[{tmp_path / 'data' / 'train.parquet'}]",
        "data.train_batch_size=8", "data.max_response_length=12", "actor_rollout_ref.rollout.n=2",
        f"trainer.default_local_dir={tmp_path}/run", "trainer.samples_per_step=16",
        "trainer.loggers=[jsonl]", "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.total_training_steps=1",
    ])  # fmt: skip
    run_training(config)
    samples = read_samples(tmp_path / "run/samples.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    expected = []
    for sample in samples:  # one after the other, without padding
        content = sample.prompt.removeprefix("user: ") + sample.response
        chat = [{"role": "user", "content": content}]
        given = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = model.generate(**given, max_new_tokens=16, do_sample=False)[0]
        new = ids[given["input_ids"].shape[1] :]
        expected.append(last_number(tokenizer.decode(new, skip_special_tokens=True)))
    assert [s.reward for s in samples] == [v or 0.0 for v in expected] and len(samples) == 16
    *_, row = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert row["judge/score"] == pytest.approx(sum(v or 0.0 for v in expected) / 16)
    assert row["judge/unread"] == expected.count(None) / 16 < 1


@pytest.mark.nightly
def test_a_reward_model_as_a_role_scores_training_and_validation(reward_model):
    local = reward_model.main("local")
    assert [step["step"] for step in local] == [0, 1, 2]
    for step in local[1:]:
        assert step["reward/mean"] == pytest.approx(step["grader/score"], abs=1e-6)
    assert local[0]["val/score"] == pytest.approx(local[0]["val/grader/score"], abs=1e-6)
    ray = reward_model.main("ray")
    for ours, theirs in zip(local, ray, strict=True):
        names = {"grader/score", "reward/mean", "actor/loss", "val/score", "val/grader/score"}
        for name in names & set(ours):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-5, abs=1e-6), name
    halved = reward_model.main("local", "grader.scale=0.25")
    assert halved[1]["grader/score"] == pytest.approx(local[1]["grader/score"] / 2)


def test_pairs_of_scored_responses(tmp_path):
    """Two prompts: five responses, two of them right, and three of which two are the same text."""
    scores = {0: [("a", 1), ("b", 0), ("c", 0), ("d", 1), ("e", 0)]}
    scores[1] = [("f", 0), ("g", 0.5), ("f", 0)]
    samples = [
        {"index": index, "prompt": f"question {index}", "response": text, "score": score}
        for index, responses in scores.items()
        for text, score in responses
    ]
    (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, samples)))
    count = import_file(FOLDER / "response_pairs.py", "example").write_pairs(
        tmp_path / "samples.jsonl", tmp_path / "pairs.jsonl"
    )
    pairs = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert count == 3
    assert [tuple(pair.values()) for pair in pairs] == [
        ("question 0", "a", "e"), ("question 0", "d", "c"), ("question 1", "g", "f"),
    ]  # fmt: skip


@pytest.mark.nightly
def test_a_judge_alone_trains_a_policy(own_roles):
    history, right = import_file(FOLDER.parent / "agents" / "judged.py", "example").main(10)
    scores = [row["val/score"] for row in history]
    assert scores[-1] > scores[0] + 1 and right > 0.7
