"""A run whose responses are on their way when it is killed, or loses a replica, trains each prompt
once. The order of its calls repeats it to the bit on one process."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from collections import Counter
from pathlib import Path

import psutil
import pytest
from run_cases import Task, assert_equal_tensors, timeless, two_steps
from run_process import RunProcess, started_run

from processes import command_line
from quadriga.observability.jsonl import Sample, read_jsonl, read_samples

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]
KILLS = int(os.environ.get("STREAM_KILLS", "10"))
LIMIT_S = 300.0


def streamed(task: Task, rule: str, folder: Path, *more: str) -> list[str]:
    """A run that records each of its responses, of 1 to 40 tokens, and saves after every step."""
    return [
        *two_steps(task, folder), rule, "data.val_files=[]", "data.max_response_length=40",
        f"actor_rollout_ref.rollout.sampling.stop_token_ids={list(range(3, 40))}",
        "trainer.total_training_steps=14", "trainer.samples_per_step=999",
        "trainer.max_staleness=2", "actor_rollout_ref.rollout.slice_tokens=3",
        "trainer.save_freq=1", "trainer.resume_mode=auto", *more,
    ]  # fmt: skip


def ended(run: RunProcess, seconds: float = LIMIT_S) -> bool:
    """Whether the run ends within some time, without an error."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        assert run.popen.wait(seconds) == 0, run.output.read_text()[-3000:]
        return True
    return False


def samples(folder: Path) -> list[Sample]:
    return read_samples(folder / "run/samples.jsonl")


def metrics(folder: Path) -> list[dict[str, float]]:
    file = folder / "run/metrics.jsonl"
    return list(read_jsonl(file)) if file.exists() else []


@pytest.fixture(scope="module")
def whole(tiny_task, rule, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    with started_run(streamed(tiny_task, rule, folder), folder / "run.log") as run:
        assert ended(run)
    ages = {row["staleness/max"] for row in metrics(folder)}
    assert ages == {0.0, 1.0, 2.0}, "responses are carried over steps"
    assert any(len(sample.weight_versions or ()) > 1 for sample in samples(folder))
    return folder


def test_a_run_that_is_killed_at_any_moment_ends_as_if_it_was_not(tiny_task, rule, whole, tmp_path):
    clock, kills = random.Random(KILLS), 0
    while True:
        overrides, more = streamed(tiny_task, rule, tmp_path), len(metrics(tmp_path)) + 1
        with started_run(overrides, tmp_path / f"{kills}.log") as run:
            while kills < KILLS and len(metrics(tmp_path)) < more and not ended(run, 0.05):
                pass
            if ended(run, clock.uniform(0.0, 0.4) if kills < KILLS else LIMIT_S):
                break
            kills += 1
    assert kills >= min(KILLS, 3)
    assert samples(tmp_path) == samples(whole)
    counts = ("reward/",)  # of the calls of the reward function, which a kill repeats
    ours, theirs = (
        [{k: v for k, v in row.items() if not k.startswith(counts)} for row in timeless(metrics(f))]
        for f in (tmp_path, whole)
    )
    assert ours == theirs


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_replica_loses_no_prompt(tiny_task, rule, whole, tmp_path, lost):
    """It is started again at the next weight sync, and its groups begin again."""
    apart = [
        "trainer.backend=ray", "trainer.num_cpus=3", "trainer.n_gpus_per_node=3",
        "placement.actor=[0]", "placement.rollout=[1,2]",
        "actor_rollout_ref.rollout.replicas.restarts=2",
    ]  # fmt: skip

    def replicas() -> list[psutil.Process]:
        return [p for p in run.processes() if command_line(p).startswith("ray::rollout")]

    overrides = streamed(tiny_task, rule, tmp_path, *apart)
    with started_run(overrides, tmp_path / "run.log") as run:
        run.wait_until(lambda: len(metrics(tmp_path)) > 1, LIMIT_S)
        replicas()[lost].kill()
        assert ended(run)
        assert "was started again" in run.output.read_text()
    assert [row["step"] for row in metrics(tmp_path)] == list(range(1, 15))
    ours, theirs = (Counter(s.prompt for s in samples(f)) for f in (tmp_path, whole))
    assert ours == theirs
    again, order = tmp_path / "again", f"trainer.replay_order={tmp_path / 'run'}"
    again.mkdir()
    overrides = [*streamed(tiny_task, rule, again, order), "trainer.resume_mode=disable"]
    with started_run(overrides, again / "run.log") as run:
        assert ended(run)
    assert samples(again) == samples(tmp_path)
    assert_equal_tensors(again / "run/model", tmp_path / "run/model")
