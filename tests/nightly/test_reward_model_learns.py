"""The commands of examples/recipes/train_reward_model.yaml: a learned reward raises accuracy."""

import shlex
from pathlib import Path

import pytest

from processes import accuracies, quadriga
from quadriga.observability.jsonl import read_jsonl

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "recipes" / "train_reward_model.yaml"


def commands():
    """Return the commands of the comment at the top, without `quadriga`."""
    top = [line[1:] for line in RECIPE.read_text().splitlines() if line.startswith("#")]
    joined = "\n".join(top).replace("\\\n", " ")
    lines = (line.strip() for line in joined.splitlines())
    return [shlex.split(line)[1:] for line in lines if line.startswith("quadriga ")]


def test_a_run_whose_reward_is_a_model_raises_accuracy(tmp_path):
    """The rules score the validation problems only. The pairs of rm_test are of these problems."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for words in commands():
        quadriga(*words, cwd=tmp_path)
    pairs = [row for row in read_jsonl(tmp_path / "learned/rm/metrics.jsonl") if "val/loss" in row]
    assert pairs[-1]["val/loss"] < 0.6 and pairs[-1]["val/accuracy"] > 0.65
    run = tmp_path / "runs" / "reward_model"
    assert not any("reward/rules" in step for step in read_jsonl(run / "metrics.jsonl"))
    accuracy = accuracies(run)
    assert accuracy[0] < 0.5
    assert accuracy[-1] > accuracy[0] + 0.15
