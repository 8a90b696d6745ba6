"""Every benchmark runs at small sizes, without peers, and prints its goals as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


NAMES = (
    "algorithms", "controller", "data_plane", "group_balance", "scale", "streams", "train_step",
    "weight_sync",
)  # fmt: skip


def printed(name, *more):
    """What a benchmark prints."""
    command = [sys.executable, f"benchmarks/{name}.py", "--quick", *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_quick_benchmark(name, tmp_path):
    trace = tmp_path / "trace.json"
    figures = printed(name, *(["--trace", str(trace)] if name == "streams" else []))["goals"]
    assert name != "streams" or json.loads(trace.read_text())["traceEvents"]
    assert figures and all({"value", "met"} <= figure.keys() for figure in figures.values())


def test_quick_grpo_step():
    cases = printed("grpo_step")["cases"]
    measured = ("ours_s", "tokens_per_second", "peak_memory_gib", "useful_flops_over_peak")
    assert cases and all(figures[name] > 0 for figures in cases.values() for name in measured)
