"""A run on Ray that is killed or stopped leaves no process, and keeps its checkpoint."""

import os
import signal
from pathlib import Path

import pytest
from run_process import RunProcess, started_run

from quadriga.checkpoint.folders import newest_undamaged_checkpoint, verify_checkpoint
from quadriga.observability.jsonl import read_jsonl

pytestmark = pytest.mark.nightly

ENDLESS = (
    "trainer.backend=ray", "trainer.num_cpus=2", "trainer.total_training_steps=100000",
    "trainer.val_before_train=false",
)  # fmt: skip


def steps_done(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return max((row["step"] for row in read_jsonl(metrics)), default=0) if metrics.exists() else 0


def in_training(run: RunProcess, folder: Path) -> None:
    run.wait_until(lambda: steps_done(folder) >= 2, timeout_s=100)
    assert len(run.processes()) > 3, "controller, Ray and at least one rank"


def test_a_controller_that_is_killed_leaves_no_process_after_10_s(
    train_overrides, tmp_path
) -> None:
    with started_run([*train_overrides, *ENDLESS], tmp_path / "out") as run:
        in_training(run, tmp_path / "run")
        run.popen.kill()
        run.popen.wait()
        seconds = run.seconds_until_empty(timeout_s=10)
    print(f"no process left after {seconds:.1f} s")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_run_that_is_stopped_saves_a_checkpoint_and_leaves_no_process(
    train_overrides, tmp_path, number
) -> None:
    with started_run([*train_overrides, *ENDLESS], tmp_path / "out") as run:
        in_training(run, tmp_path / "run")
        # SLURM sends SIGUSR1 to all processes of a job, a terminal SIGHUP.
        all_of_run = [process.pid for process in run.processes()]
        for pid in all_of_run if number != signal.SIGTERM else [run.popen.pid]:
            os.kill(pid, number)
        assert run.popen.wait(timeout=60) == 128 + signal.SIGTERM
        run.seconds_until_empty(timeout_s=15)
    found = newest_undamaged_checkpoint(tmp_path / "run" / "checkpoints")[0]
    assert verify_checkpoint(found)["step"] == steps_done(tmp_path / "run")
    assert not (tmp_path / "run" / "run.lock").exists()
