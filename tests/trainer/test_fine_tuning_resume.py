"""`quadriga sft` and `quadriga rm` save checkpoints and are resumed from them: six steps equal
three steps, a resume, and three more steps, bit for bit."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fine_tuning_cases import Runs, pairs, six_steps
from run_cases import timeless
from safetensors.torch import load_file

from quadriga.checkpoint.folders import complete_checkpoints, read_marker
from quadriga.cli.main import main
from quadriga.errors import CheckpointError
from quadriga.observability.jsonl import read_jsonl

COMMANDS = ("sft", pytest.param("rm", marks=pytest.mark.nightly))


@pytest.fixture(params=COMMANDS)
def runs(request, tiny_task, tmp_path) -> Runs:
    return six_steps(request.param, tiny_task, tmp_path)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors in the files of a folder: weights, moments and random states."""
    return {
        f"{file.relative_to(folder)}: {name}": tensor
        for file in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


VARIANTS = {
    "schedule, validation at each step": (
        "optim.lr_scheduler=cosine", "optim.lr_warmup_steps=4", "trainer.test_freq=1",
    ),
    "adapters with dropout, sequences one by one": (
        "model.lora.rank=2", "model.lora.dropout=0.3", "data.micro_batch_size_per_gpu=1",
        "engine.use_dynamic_bsz=false",
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_equals_an_uninterrupted_one(runs, variant) -> None:
    settings = (*VARIANTS[variant], "trainer.save_freq=3")
    whole = runs.run("whole", *settings)
    half = f"trainer.resume_mode={runs.checkpoint('whole', 3)}"
    resumed = runs.run("resumed", *settings, half)
    assert [row["step"] for row in runs.metrics("resumed")] == [4, 5, 6]
    assert runs.metrics("resumed") == runs.metrics("whole")[3:]
    assert "val/loss" in runs.metrics("whole")[-1]
    assert resumed.steps == whole.steps == 6
    for name in ("checkpoints/global_step_6", "model"):
        ours, theirs = (tensors(runs.folder / run / name) for run in ("whole", "resumed"))
        assert list(ours) == list(theirs) and len(ours) > 5
        assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == [], name


def test_the_newest_checkpoint_continues_the_run_in_its_folder(runs) -> None:
    runs.run("run", "trainer.save_freq=2", "trainer.max_ckpt_to_keep=2")
    whole = runs.metrics("run")
    folder = runs.folder / "run" / "checkpoints"
    assert [step for step, _ in complete_checkpoints(folder)] == [4, 6]
    shard = next(runs.checkpoint("run", 6).rglob("shard_*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    runs.run("run", "trainer.resume_mode=auto", "trainer.save_freq=2")
    assert runs.metrics("run") == whole
    assert [path.name for path in folder.glob("*.set_aside")] == ["global_step_6.set_aside"]


CHANGES = [
    ("data.max_length=500", "data.max_length: 1024 → 500"),
    ("optim.name=muon", "optim.name: adamw → muon"),
    ("data.train_files={other}", "the content of data.train_files is another one"),
]


def test_what_cannot_be_continued_is_refused_before_a_worker_starts(
    runs, tiny_task, monkeypatch
) -> None:
    runs.run("run", "trainer.total_training_steps=1")
    before = (runs.folder / "run" / "metrics.jsonl").read_text()
    other = tiny_task.data("test")
    if runs.command == "rm":
        other = pairs(runs.folder / "other.jsonl", 21)
    monkeypatch.setattr("quadriga.backends.get_backend", None)  # a start would raise TypeError
    for change, said in CHANGES:
        with pytest.raises(CheckpointError, match="cannot be continued") as caught:
            runs.run("run", "trainer.resume_mode=auto", change.format(other=other))
        text = str(caught.value)
        assert said in text and "trainer.resume_override=true" in text
    assert (runs.folder / "run" / "metrics.jsonl").read_text() == before


def test_a_signal_lets_the_step_end_and_saves_a_checkpoint(runs, monkeypatch) -> None:
    from quadriga.trainer.record import RunRecord

    original = RunRecord.log_update

    def log_update(self, report):
        original(self, report)
        if self.folder.path.name == "stopped" and not list(read_jsonl(self.folder.metrics)):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(RunRecord, "log_update", log_update)
    runs.run("whole", "trainer.total_training_steps=3")
    assert main([runs.command, *runs.given("stopped", "trainer.total_training_steps=3")]) == 143
    found = complete_checkpoints(runs.folder / "stopped" / "checkpoints")
    assert [step for step, _ in found] == [1]
    runs.run("stopped", "trainer.total_training_steps=3", "trainer.resume_mode=auto")
    assert runs.metrics("stopped") == runs.metrics("whole")


@pytest.fixture
def failing(monkeypatch):
    """failing(step): the validation of this step fails at its end; failing(None): none fails."""
    from quadriga.trainer.record import RunRecord

    original = RunRecord.log_validation
    failing_step: list[int | None] = [None]

    def log_validation(self, step, *rest):
        if step == failing_step[0]:
            raise RuntimeError("out of memory")
        original(self, step, *rest)

    monkeypatch.setattr(RunRecord, "log_validation", log_validation)
    return lambda step: failing_step.__setitem__(0, step)


@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.nightly), 4])
def test_a_validation_that_fails_loses_no_step(runs, failing, step) -> None:
    settings = ("trainer.total_training_steps=4", "trainer.test_freq=2", "trainer.save_freq=2")
    whole = runs.run("whole", *settings)
    failing(step)
    with pytest.raises(RuntimeError, match="out of memory"):
        runs.run("run", *settings)
    state = read_marker(runs.checkpoint("run", step))
    before = read_marker(runs.checkpoint("whole", 2))["validation"] if step == 4 else {}
    assert state["validation_pending"] and state["validation"] == before
    assert [row["step"] for row in runs.metrics("run")] == list(range(1, step + 1))
    with pytest.raises(RuntimeError, match="out of memory"):  # the validation is due again
        runs.run("run", *settings, "trainer.resume_mode=auto")
    failing(None)
    resumed = runs.run("run", *settings, "trainer.resume_mode=auto")
    assert (resumed.steps, resumed.model_path) == (4, str(runs.folder / "run" / "model"))
    for number in (2, 4):
        ours, theirs = (read_marker(runs.checkpoint(run, number)) for run in ("run", "whole"))
        assert ours["validation"] == theirs["validation"] != {}
        assert not ours["validation_pending"] and not theirs["validation_pending"]
    merged: dict[float, dict[str, float]] = {}
    for row in runs.metrics("run"):
        merged.setdefault(row["step"], {}).update(row)
    assert list(merged.values()) == runs.metrics("whole")
    for name in ("checkpoints/global_step_4", "model"):
        ours, theirs = (tensors(runs.folder / run / name) for run in ("run", "whole"))
        assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == [], name
    assert whole.steps == 4


KILLED_IN_VALIDATION = """
import os, signal, sys
from quadriga.cli.main import main
from quadriga.trainer.checkpoints import Checkpointing
from quadriga.trainer.record import RunRecord

{call} = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("call", "logged"),
    [
        ("RunRecord.log_validation", []),
        pytest.param("Checkpointing.record_validation", [1], marks=pytest.mark.nightly),
    ],
    ids=["in it", "before it is recorded"],
)
def test_a_run_that_is_killed_in_a_validation_loses_and_repeats_nothing(runs, call, logged) -> None:
    settings = ("trainer.total_training_steps=2", "trainer.test_freq=1", "trainer.save_freq=1")
    runs.run("whole", *settings)
    command = [sys.executable, "-c", KILLED_IN_VALIDATION.format(call=call), runs.command]
    done = subprocess.run([*command, *runs.given("run", *settings)], check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert [row["step"] for row in runs.metrics("run")] == logged
    runs.run("run", *settings, "trainer.resume_mode=auto")
    assert [row["step"] for row in runs.metrics("run")] == [1, 1, 2]
    lost, validation, last = read_jsonl(runs.folder / "run" / "metrics.jsonl")
    assert lost["time/step"] > 0 and not lost.keys() & {"val/loss", "val/score"}
    (first, second) = runs.metrics("whole")
    assert timeless([lost | validation, last]) == [first, second]
    ours, theirs = (runs.folder / run / "samples.jsonl" for run in ("run", "whole"))
    assert ours.read_text() == theirs.read_text()
    # A second resume finds the rows, and writes them no more.
    runs.run("run", *settings, f"trainer.resume_mode={runs.checkpoint('run', 1)}")
    assert [row["step"] for row in runs.metrics("run")] == [1, 1, 2]
    assert ours.read_text() == theirs.read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("runs", ["sft"], indirect=True)
def test_a_run_that_has_reached_its_goal_takes_no_step_when_it_is_resumed(runs) -> None:
    goal = ("trainer.stop_at_accuracy=0.0", "trainer.test_freq=2", "trainer.save_freq=5")
    first = runs.run("run", *goal)
    assert first.steps == 2
    assert runs.run("run", *goal, "trainer.resume_mode=auto") == first
    assert runs.run("run", "trainer.resume_mode=auto").steps == 6
