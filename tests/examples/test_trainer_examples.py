"""The examples in examples/trainer run and compute the same on both backends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quadriga.containment import import_file

FOLDER = Path(__file__).parents[2] / "examples" / "trainer"


@pytest.fixture
def reward_model(monkeypatch):
    from quadriga.algorithms import user_files
    from quadriga.trainer.roles import registry
    from quadriga.trainer.roles.registry import _ROLES, Role

    monkeypatch.setattr(registry, "_ADDED", {})
    monkeypatch.setattr(user_files, "_LOADED", {})
    module = import_file(FOLDER / "reward_model.py", "example")
    known = set(_ROLES)
    yield module
    for name in set(_ROLES) - known:
        del _ROLES[name]
        delattr(Role, name)


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
def test_a_text_game_is_learned():
    game = import_file(FOLDER.parent / "agents" / "guess_number.py", "example")
    scores = [row["val/score"] for row in game.main(40)]
    assert max(scores[1:]) > scores[0] + 0.05
