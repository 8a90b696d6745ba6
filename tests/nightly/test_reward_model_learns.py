"""The commands of examples/recipes/train_reward_model.yaml: a learned reward raises accuracy."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "examples" / "recipes" / "train_reward_model.yaml"


def commands():
    """Return the commands of the comment at the top, without `quadriga`."""
    top = [line[1:] for line in RECIPE.read_text().splitlines() if line.startswith("#")]
    joined = "\n".join(top).replace("\\\n", " ")
    lines = (line.strip() for line in joined.splitlines())
    return [shlex.split(line)[1:] for line in lines if line.startswith("quadriga ")]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_whose_reward_is_a_model_raises_accuracy(tmp_path):
    """The rules score the validation problems only. The pairs of rm_test are of these problems."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for words in commands():
        done = subprocess.run(
            [sys.executable, "-m", "quadriga.cli.main", *words],
            cwd=tmp_path, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    pairs = [row for row in metrics(tmp_path / "learned" / "rm") if "val/accuracy" in row]
    assert pairs[-1]["val/loss"] < 0.6 and pairs[-1]["val/accuracy"] > 0.65
    steps = metrics(tmp_path / "runs" / "reward_model")
    assert not any("reward/rules" in step for step in steps)
    accuracy = [step["val/accuracy"] for step in steps if "val/accuracy" in step]
    assert accuracy[0] < 0.5
    assert accuracy[-1] > accuracy[0] + 0.15
