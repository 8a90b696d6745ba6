"""A run whose responses are on their way when it loses a replica trains each prompt once.
The order of its calls repeats it to the bit on one process."""

from collections import Counter
from pathlib import Path

import psutil
import pytest
from run_cases import Task, assert_equal_tensors, two_steps
from run_process import RunProcess, started_run

from processes import command_line
from quadriga.observability.jsonl import Sample, read_jsonl, read_samples

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]
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


def end(run: RunProcess) -> None:
    """Wait for the end of the run, which has no error."""
    assert run.popen.wait(LIMIT_S) == 0, run.output.read_text()[-3000:]


def samples(folder: Path) -> list[Sample]:
    return read_samples(folder / "run/samples.jsonl")


def metrics(folder: Path) -> list[dict[str, float]]:
    file = folder / "run/metrics.jsonl"
    return list(read_jsonl(file)) if file.exists() else []


@pytest.fixture(scope="module")
def whole(tiny_task, rule, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    with started_run(streamed(tiny_task, rule, folder), folder / "run.log") as run:
        end(run)
    ages = {row["staleness/max"] for row in metrics(folder)}
    assert ages == {0.0, 1.0, 2.0}, "responses are carried over steps"
    assert any(len(sample.weight_versions or ()) > 1 for sample in samples(folder))
    return folder


@pytest.mark.parametrize(("lost", "how"), [(0, "kill"), (1, "kill"), (0, "suspend")])
def test_a_lost_replica_loses_no_prompt(tiny_task, rule, whole, tmp_path, lost, how):
    """It is started again at the next weight sync. One that is stuck is lost at its deadline."""
    apart = [
        "trainer.backend=ray", "trainer.num_cpus=3", "trainer.n_gpus_per_node=3",
        "placement.actor=[0]", "placement.rollout=[1,2]",
        "actor_rollout_ref.rollout.replicas.restarts=2", "trainer.call_timeout_s=30",
    ]  # fmt: skip

    def replicas() -> list[psutil.Process]:
        return [p for p in run.processes() if command_line(p).startswith("ray::rollout")]

    overrides = streamed(tiny_task, rule, tmp_path, *apart)
    with started_run(overrides, tmp_path / "run.log") as run:
        run.wait_until(lambda: len(metrics(tmp_path)) > 1, LIMIT_S)
        getattr(replicas()[lost], how)()
        end(run)
        assert "was started again" in run.output.read_text()
    assert [row["step"] for row in metrics(tmp_path)] == list(range(1, 15))
    ours, theirs = (Counter(s.prompt for s in samples(f)) for f in (tmp_path, whole))
    assert ours == theirs
    again, order = tmp_path / "again", f"trainer.replay_order={tmp_path / 'run'}"
    again.mkdir()
    overrides = [*streamed(tiny_task, rule, again, order), "trainer.resume_mode=disable"]
    with started_run(overrides, again / "run.log") as run:
        end(run)
    assert samples(again) == samples(tmp_path)
    assert_equal_tensors(again / "run/model", tmp_path / "run/model")
