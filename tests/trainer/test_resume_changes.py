"""A run that is resumed with other settings or data says what has changed, and refuses what cannot
be continued."""

import shutil
from pathlib import Path

import pytest
from run_cases import metrics_of_run, two_steps

from quadriga.checkpoint import folders
from quadriga.config.commands import RMConfig, SFTConfig
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import CheckpointError
from quadriga.trainer.checkpoints import check_changes, inputs_of

RESUME = ("trainer.resume_mode=auto", "trainer.total_training_steps=3")
LR = "actor_rollout_ref.actor.optim.lr"


@pytest.fixture(scope="module")
def finished(tiny_task, tmp_path_factory) -> Path:
    """The folder of a run of two steps."""
    folder = tmp_path_factory.mktemp("finished")
    metrics_of_run([*two_steps(tiny_task, folder), "data.train_batch_size=8"])
    return folder / "run"


@pytest.fixture
def first(finished, tmp_path) -> Path:
    """A copy of this folder, which `run` resumes."""
    return shutil.copytree(finished, tmp_path / "run")


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
    "data.special_tokens=refuse": "data.special_tokens: keep → refuse",
    "algorithm.adv_estimator=gae": "algorithm.adv_estimator: grpo → gae",
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
    info = folders.read_marker(folders.newest_undamaged_checkpoint(first / "checkpoints")[0])
    assert info["loader"]["batches_done"] == 1, "changed data begins at the start of the epoch"


def test_data_that_has_moved_is_the_same_data(train_overrides, tiny_task, tmp_path, caplog) -> None:
    moved = shutil.copy(tiny_task.folder / "data/train.parquet", tmp_path / "moved.parquet")
    saved, own = (
        inputs_of(load_config(TrainConfig, [*train_overrides, *more]))
        for more in ([], [f"data.train_files=[{moved}]"])
    )
    assert not check_changes(tmp_path, saved, own, override=False, tell=True)
    (told,) = caplog.messages
    assert "data.train_files: " in told and ";" not in told


@pytest.mark.parametrize("cls", [SFTConfig, RMConfig])
def test_fine_tuning_cannot_continue_other_rows(cls, tmp_path, caplog) -> None:
    own = inputs_of(load_config(cls, ["data.max_length=500", "optim.lr=1e-3"]))
    refused = "data.max_length: 1024 → 500"
    with pytest.raises(CheckpointError, match=f"with these changes: {refused}; undo them"):
        check_changes(tmp_path, inputs_of(cls()), own, override=False, tell=True)
    assert check_changes(tmp_path, inputs_of(cls()), own, override=True, tell=True)
    assert caplog.messages[-1].endswith(f"changes: {refused}; optim.lr: 1e-05 → 0.001")


def test_later_steps_of_the_first_attempt_are_set_aside(run, tmp_path) -> None:
    run("trainer.save_freq=1", "trainer.total_training_steps=3")
    checkpoints = tmp_path / "run" / "checkpoints"
    rows = run(
        f"trainer.resume_mode={checkpoints / 'global_step_1'}",
        "trainer.total_training_steps=2",
        "trainer.max_ckpt_to_keep=2",
    )
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [step for step, _ in folders.complete_checkpoints(checkpoints)] == [1, 2]
    assert {p.name for p in checkpoints.glob("*.set_aside")} == {
        "global_step_2.set_aside",
        "global_step_3.set_aside",
    }
