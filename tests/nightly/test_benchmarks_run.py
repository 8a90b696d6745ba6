"""Every benchmark runs at small sizes, without peers, and prints its goals as JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


NAMES = (
    "agents", "algorithms", "controller", "data_plane", "group_balance", "saving", "scale",
    "streams", "train_step",
    "weight_sync",
)  # fmt: skip


def printed(name, *more):
    """What a benchmark prints."""
    command = [sys.executable, f"benchmarks/{name}.py", "--quick", *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def check_trace(events):
    """Every span has a track with a name, and no negative duration."""
    spans = [event for event in events if event["ph"] == "X"]
    tracks = [event["tid"] for event in events if event["ph"] == "M"]
    assert spans and len(events) == len(spans) + len(tracks)
    assert sorted(tracks) == sorted({event["tid"] for event in spans})
    assert all(event["dur"] >= 0 for event in spans)


@pytest.mark.parametrize("name", NAMES)
def test_quick_benchmark(name, tmp_path):
    trace = tmp_path / "trace.json"
    figures = printed(name, *(["--trace", str(trace)] if name == "streams" else []))["goals"]
    if name == "streams":
        check_trace(json.loads(trace.read_text())["traceEvents"])
    assert figures and all({"value", "met"} <= figure.keys() for figure in figures.values())


def test_quick_grpo_step():
    cases = printed("grpo_step")["cases"]
    measured = ("ours_s", "tokens_per_second", "peak_memory_gib", "useful_flops_over_peak")
    assert cases and all(figures[name] > 0 for figures in cases.values() for name in measured)


def test_gpu_proof_on_a_cpu(tmp_path):
    """Every part runs or names the package that it lacks, and twenty steps are the same twice."""
    command = ["scripts/gpu_proof.sh", "--device", "cpu", "--size", "1m", "--out"]
    file = tmp_path / "proof.json"
    done = subprocess.run(
        [*command, str(file)], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(file.read_text())
    assert json.loads(done.stdout) == found
    assert found["digest of 20 steps"]["equal"]
    assert "refused" in found["attention"]["varlen"]
    assert found["sleep"]["hf"]["generates_the_same"]
    for name in ("step 1m hf", "offload"):
        (case,) = found[name]["cases"].values()
        assert case["tokens_per_second"] > 0 and case["planned_memory_gib"] > 0
    assert not any("failed" in part for part in found.values())
