"""What a signal does to a run: it ends the step, saves a checkpoint, and stops within the grace."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from quadriga.checkpoint.folders import complete_checkpoints, latest_checkpoint, verify_checkpoint
from quadriga.cli.main import main
from quadriga.observability.jsonl import read_jsonl
from quadriga.trainer import ppo, stages
from quadriga.trainer.checkpoints import StopRequest, unchanged_handlers

SIGNALS = [signal.SIGINT, signal.SIGTERM]


def stopper(save=True, grace_s=60.0):
    return StopRequest(save=save, grace_s=grace_s)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_lets_the_step_end_and_the_second_does_not(number):
    stop = stopper()
    before = signal.getsignal(number)
    with stop.listening(), stop.steps():
        stop.stop_if_requested()
        signal.raise_signal(number)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt) as caught:
            stop.stop_if_requested()
        assert caught.value.args == (number,)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) == before


@pytest.mark.timeout(60)  # an interrupt that does not reach the step
def test_a_step_that_takes_longer_than_the_grace_is_interrupted():
    stop = stopper(grace_s=0.2)
    with stop.listening(), stop.steps(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
        time.sleep(600)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_library_does_not_replace_the_handlers_of_the_run(number):
    stop = stopper()
    with stop.listening():
        with unchanged_handlers():
            signal.signal(number, lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)


@pytest.mark.parametrize(("number", "save"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_run_that_is_stopped_can_be_resumed(
    train_overrides, tmp_path: Path, monkeypatch, number, save
) -> None:
    original = stages.measure_batch

    def stop_in_step_2(batch):
        steps = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
        if steps and steps[-1]["step"] == 1:
            signal.raise_signal(number)
        return original(batch)

    monkeypatch.setattr(ppo.stages, "measure_batch", stop_in_step_2)
    settings = [*train_overrides, "trainer.total_training_steps=3", "trainer.seed=3"]
    overrides = ["train", *settings, f"trainer.save_on_stop={str(save).lower()}"]
    assert main(overrides) == 128 + number
    folder = tmp_path / "run"
    assert not (folder / "run.lock").exists()
    found = latest_checkpoint(folder / "checkpoints")
    if not save:
        assert found is None
        return
    assert verify_checkpoint(found)["step"] == 2
    monkeypatch.undo()
    assert main(["train", *settings, "trainer.resume_mode=auto"]) == 0
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl")] == [0, 1, 2, 3]


def test_a_run_with_default_settings_saves_by_time_and_at_the_end(run, tmp_path) -> None:
    quick = ("trainer.val_before_train=false", "data.val_files=[]")
    run(*quick, "trainer.save_interval_s=0.001")
    assert [s for s, _ in complete_checkpoints(tmp_path / "run" / "checkpoints")] == [1, 2]
    run(*quick, f"trainer.default_local_dir={tmp_path / 'end'}")
    assert [s for s, _ in complete_checkpoints(tmp_path / "end" / "checkpoints")] == [2]
