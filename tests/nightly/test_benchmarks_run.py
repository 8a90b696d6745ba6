"""Every benchmark runs at small sizes, without peers, and prints its goals as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "name",
    [
        "algorithms",
        "controller",
        "data_plane",
        "group_balance",
        "scale",
        "train_step",
        "weight_sync",
    ],
)
def test_quick_benchmark(name):
    done = subprocess.run(
        [sys.executable, f"benchmarks/{name}.py", "--quick"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads(done.stdout)["goals"]
    assert figures and all({"value", "met"} <= figure.keys() for figure in figures.values())


def test_quick_grpo_step():
    done = subprocess.run(
        [sys.executable, "benchmarks/grpo_step.py", "--quick"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    cases = json.loads(done.stdout)["cases"]
    measured = ("ours_s", "tokens_per_second", "peak_memory_gib", "useful_flops_over_peak")
    assert cases and all(figures[name] > 0 for figures in cases.values() for name in measured)
