"""Generation that is killed, or loses a rank, is continued to the undisturbed file."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from quadriga.cli.make_data import run_make_data
from quadriga.config.commands import ArithmeticDataConfig
from quadriga.config.loading import load_config

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
PROMPTS = 48
DEADLINE_S = 300.0


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    run_make_data(
        load_config(
            ArithmeticDataConfig,
            [f"output={folder / 'data'}", f"model_output={folder / 'base'}", "train_size=4",
             f"val_size={PROMPTS}", "sft_size=4", "max_number=9", "hidden_size=64",
             "num_layers=4", "num_heads=2", "num_kv_heads=1", "intermediate_size=64"],
        )
    )  # fmt: skip
    return folder


def command(task: Path, output: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "quadriga.cli.main", "generate", f"model.path={task / 'base'}",
        f"data_files={task / 'data' / 'test.parquet'}", "n=4", "sampling.temperature=1",
        "max_response_length=48", "batch_size=1", "trainer.device=cpu",
        "trainer.threads_per_worker=1", f"output={output}", *more,
    ]  # fmt: skip


def lines(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0


def after_rows(process: subprocess.Popen[bytes], output: Path, rows: int) -> None:
    """Wait until the output has this many rows."""
    limit = time.monotonic() + DEADLINE_S
    while lines(output) < rows:
        assert process.poll() is None, f"it ended before it was disturbed: {end(process)}"
        assert time.monotonic() < limit, f"{output} has no {rows} rows"
        time.sleep(0.002)


def end(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Return the exit code and standard error."""
    _, err = process.communicate(timeout=DEADLINE_S)
    return process.returncode, err.decode()


@pytest.fixture(scope="module")
def whole(task) -> bytes:
    output = task / "whole.jsonl"
    subprocess.run(command(task, output), check=True, timeout=DEADLINE_S, capture_output=True)
    return output.read_bytes()


def test_a_rank_that_is_killed_is_named_and_the_command_continues(task, whole, tmp_path) -> None:
    output = tmp_path / "answers.jsonl"
    ray = ("trainer.backend=ray", "trainer.n_gpus_per_node=2", "trainer.num_cpus=2")
    process = subprocess.Popen(command(task, output, *ray), stderr=subprocess.PIPE)
    after_rows(process, output, 5)
    ranks = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "ActorRolloutRefWorker" in " ".join(child.cmdline()) and child.is_running()
    ]
    assert len(ranks) == 2
    os.kill(ranks[1].pid, signal.SIGKILL)
    code, err = end(process)
    assert code == 75  # a loss, after which the same command continues
    assert "rank" in err and "the same command generates the responses that " in err
    kept = output.read_bytes()
    assert whole.startswith(kept) and kept.count(b"\n") >= 5
    subprocess.run(command(task, output), check=True, timeout=DEADLINE_S, capture_output=True)
    assert output.read_bytes() == whole
