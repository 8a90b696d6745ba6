"""`quadriga demo` from start to end: reinforcement learning improves on imitation."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("setting", "least"), [("seed=0", 0.9), ("adv_estimator=gae", 0.9), ("lora_rank=32", 0.75)]
)
def test_the_demo_learns(tmp_path, setting, least):
    """Greedy accuracy on the validation problems rises from below 0.6 to above `least`."""
    done = subprocess.run(
        [sys.executable, "-m", "quadriga.cli.main", "demo", setting],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    with open(tmp_path / "runs/demo/train/metrics.jsonl") as file:
        steps = [json.loads(line) for line in file]
    accuracy = [step["val/accuracy"] for step in steps if "val/accuracy" in step]
    assert accuracy[0] < 0.6
    assert accuracy[-1] > least
