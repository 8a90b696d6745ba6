"""Checkpoints that are written beside the steps: the step does not wait, and nothing is lost."""

import errno
import threading
from pathlib import Path

import pytest
from fine_tuning_cases import six_steps
from run_cases import assert_equal_tensors, noted, often

from quadriga.checkpoint import shards, writer
from quadriga.checkpoint.folders import complete_checkpoints, read_marker, verify_checkpoint
from quadriga.cli.main import main
from quadriga.observability.jsonl import read_jsonl
from quadriga.trainer import stages

EACH_STEP = ("trainer.save_freq=1", "trainer.max_ckpt_to_keep=null", "data.val_files=[]")


def steps_saved(folder: Path) -> list[int]:
    return [step for step, _ in complete_checkpoints(folder / "checkpoints")]


@pytest.fixture
def slow_disk(monkeypatch):
    """The first write of a shard waits for the event, for ten seconds at most."""
    begun, go_on = threading.Event(), threading.Event()
    write = shards.write_tensors

    def slow(path, *given):
        if not begun.is_set():
            begun.set()
            assert go_on.wait(10)
        return write(path, *given)

    monkeypatch.setattr(shards, "write_tensors", slow)
    return begun, go_on


def test_a_step_does_not_wait_for_the_disk_and_the_next_checkpoint_does(
    run, tmp_path, slow_disk, monkeypatch
) -> None:
    begun, go_on = slow_disk
    seen = []

    def saved(self, folder, state, *given):
        if state.step == 2:  # due while the first one is written
            seen.append((begun.is_set(), steps_saved(tmp_path / "run")))
            threading.Timer(0.3, go_on.set).start()

    noted(monkeypatch, writer.CheckpointWriter, "save", saved)
    rows = run(*EACH_STEP, "trainer.total_training_steps=3")
    assert seen == [(True, [])]
    assert steps_saved(tmp_path / "run") == [1, 2, 3]
    assert rows[1]["time/save"] >= 0.3 and rows[1]["time/written"] >= 0.3
    for _, folder in complete_checkpoints(tmp_path / "run/checkpoints"):
        verify_checkpoint(folder)
        assert not list(folder.rglob("report_*"))


def full_disk(path, *given):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("beside", [True, False])
def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_one_line(
    train_overrides, tmp_path, monkeypatch, capsys, beside
) -> None:
    write, failing = shards.write_tensors, iter([False, False, True])
    third = lambda *given: full_disk(*given) if next(failing, True) else write(*given)  # noqa: E731
    monkeypatch.setattr(shards, "write_tensors", third)  # the first of step 2
    settings = [*EACH_STEP, "trainer.total_training_steps=4", f"trainer.async_save={beside}"]
    assert main(["train", *train_overrides, *settings]) != 0
    assert "No space left on device" in capsys.readouterr().err
    assert steps_saved(tmp_path / "run") == [1]
    rows = [row["step"] for row in read_jsonl(tmp_path / "run/metrics.jsonl")]
    assert rows == [1, 2] or (beside and rows == [1, 2, 3])  # the next step at the latest


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_run_that_fails_commits_what_is_written_and_one_that_is_interrupted_does_not_wait(
    run, tmp_path, slow_disk, monkeypatch, error
) -> None:
    begun, go_on = slow_disk

    def fail(batch):
        if begun.is_set():
            threading.Timer(0.3, go_on.set).start()
            raise error("in step 2")

    noted(monkeypatch, stages, "measure_batch", fail)
    with pytest.raises(error, match="in step 2"):
        run(*EACH_STEP)
    waited = error is RuntimeError
    assert steps_saved(tmp_path / "run") == [1] * waited
    go_on.set()
    monkeypatch.undo()
    run(*EACH_STEP, "trainer.resume_mode=auto")
    assert steps_saved(tmp_path / "run") == [1, 2]


@pytest.mark.parametrize("command", often(["train", "sft", "rm"], "train"))
def test_a_checkpoint_is_the_same_whether_it_is_written_beside_the_steps(
    run, tiny_task, tmp_path, command
) -> None:
    folders = []
    for beside in (True, False):
        folders.append(tmp_path / f"beside={beside}")
        more = [*EACH_STEP[:2], f"trainer.async_save={beside}", "trainer.total_training_steps=2"]
        if command == "train":
            critic = ("algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=4")
            run(*more, *critic, f"trainer.default_local_dir={folders[-1]}")
        else:
            six_steps(command, tiny_task, tmp_path).run(folders[-1].name, *more)
    for step in (1, 2):
        ours, theirs = (folder / "checkpoints" / f"global_step_{step}" for folder in folders)
        assert_equal_tensors(ours, theirs)
        assert read_marker(ours) == {**read_marker(theirs), "inputs": read_marker(ours)["inputs"]}
