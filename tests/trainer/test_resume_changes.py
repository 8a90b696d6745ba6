"""A run that is resumed with other settings or data says what has changed, and refuses what cannot
be continued."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from run_cases import timeless

from quadriga.checkpoint.folders import complete_checkpoints, latest_checkpoint, read_marker
from quadriga.errors import CheckpointError

RESUME = ("trainer.resume_mode=auto", "trainer.total_training_steps=3")
LR = "actor_rollout_ref.actor.optim.lr"


@pytest.fixture
def first(run, tmp_path) -> Path:
    """The folder of a run of two steps."""
    run("data.train_batch_size=8")
    return tmp_path / "run"


def test_a_change_that_can_be_continued_is_told(first, run, caplog) -> None:
    rows = run(*RESUME, f"{LR}=5e-4")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert f"{LR}: 0.001 → 0.0005" in caplog.text
    assert "total_training_steps: 2 → 3" in caplog.text
    assert "resume_mode" not in caplog.text


CHANGES = {
    "data.train_batch_size=4": "data.train_batch_size: 8 → 4",
    "trainer.seed=5": "trainer.seed: 0 → 5",
    "data.shuffle=false": "data.shuffle: True → False",
    "algorithm.adv_estimator=gae": "algorithm.adv_estimator: grpo → gae",
    "actor_rollout_ref.actor.optim.name=muon": "actor.optim.name: adamw → muon",
    "actor_rollout_ref.model.freeze=[model.embed_tokens.*]": "actor_rollout_ref.model.freeze",
    "actor_rollout_ref.model.lora.rank=2": "actor_rollout_ref.model.lora.rank: None → 2",
    "data.train_files={other}": "the content of data.train_files is another one",
    "actor_rollout_ref.model.path={model}": "config.json of actor_rollout_ref.model.path is",
}


def test_what_cannot_be_continued_is_refused(first, run, tiny_task, tmp_path, monkeypatch) -> None:
    before = (first / "metrics.jsonl").read_text()
    (tmp_path / "model").mkdir()
    for file in tiny_task.model.iterdir():
        text = file.read_bytes()
        (tmp_path / "model" / file.name).write_bytes(
            text.rstrip() + b"\n\n" if file.name == "config.json" else text
        )
    for change, said in CHANGES.items():
        change = change.format(other=tiny_task.data("test"), model=tmp_path / "model")
        with pytest.raises(CheckpointError, match="cannot be continued") as caught:
            run(*RESUME, change)
        assert said in str(caught.value) and "trainer.resume_override=true" in str(caught.value)
    assert (first / "metrics.jsonl").read_text() == before
    # A critic without a state is named before a worker starts.
    monkeypatch.setattr("quadriga.backends.get_backend", None)  # a start would raise TypeError
    with pytest.raises(CheckpointError, match="has no state of role critic"):
        run(*RESUME, "algorithm.adv_estimator=gae", "trainer.resume_override=true")


def test_the_user_can_insist(first, run, caplog) -> None:
    change = ("data.train_batch_size=4", "trainer.resume_override=true")
    rows = run(*RESUME, *change)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert "data.train_batch_size: 8 → 4" in caplog.text
    info = read_marker(latest_checkpoint(first / "checkpoints"))
    assert info["loader"]["batches_done"] == 1, "changed data begins at the start of the epoch"


def test_data_that_has_moved_is_the_same_data(first, run, tiny_task, tmp_path, caplog) -> None:
    (tmp_path / "moved.parquet").write_bytes((tiny_task.folder / "data/train.parquet").read_bytes())
    assert len(run(*RESUME, f"data.train_files=[{tmp_path / 'moved.parquet'}]")) == 4
    assert "content of" not in caplog.text


@pytest.mark.parametrize("kept", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_kill_while_later_steps_are_removed_leaves_the_steps_before_them(
    run, tmp_path, monkeypatch, kept
) -> None:
    """`kept`: of the later checkpoints, the number that are not renamed when the run is killed."""
    settings = ("trainer.save_freq=1", "trainer.total_training_steps=3")
    whole, checkpoints = timeless(run(*settings)), tmp_path / "run" / "checkpoints"
    replace, renamed = os.replace, []

    def killed(source, target) -> None:
        if str(target).endswith("set_aside"):
            renamed.append(target)
        if len(renamed) > 2 - kept:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            run(*settings, f"trainer.resume_mode={checkpoints / 'global_step_1'}")
    assert timeless(run(*settings, "trainer.resume_mode=auto")) == whole


def test_later_steps_of_the_first_attempt_are_set_aside(run, tmp_path) -> None:
    run("trainer.save_freq=1", "trainer.total_training_steps=3")
    checkpoints = tmp_path / "run" / "checkpoints"
    rows = run(
        f"trainer.resume_mode={checkpoints / 'global_step_1'}",
        "trainer.total_training_steps=2",
        "trainer.max_ckpt_to_keep=2",
    )
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [step for step, _ in complete_checkpoints(checkpoints)] == [1, 2]
    assert {p.name for p in checkpoints.glob("*.set_aside")} == {
        "global_step_2.set_aside",
        "global_step_3.set_aside",
    }
