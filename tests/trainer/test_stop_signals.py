"""What a signal does to a run: it ends the step, saves a checkpoint, and stops within the grace."""

import fcntl
import os
import pkgutil
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fine_tuning_cases import six_steps
from run_cases import noted, often
from run_process import TRAIN

from quadriga.checkpoint import folders
from quadriga.cli.main import main
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import RewardError
from quadriga.observability.jsonl import read_jsonl
from quadriga.trainer import checkpoints, stages
from quadriga.trainer.checkpoints import StopRequest, unchanged_handlers

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]


@pytest.fixture(autouse=True)
def _signals_of_a_terminal():
    """Also where the tests were started with nohup, which ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def stopper(grace_s=60.0):
    return StopRequest(load_config(TrainConfig, [f"trainer.stop_grace_s={grace_s}"]).trainer)


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
        # SLURM sends SIGUSR1, a terminal SIGHUP, and the run ends as after SIGTERM.
        assert caught.value.args == (number if number == signal.SIGINT else signal.SIGTERM,)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) == before


def test_a_run_under_nohup_goes_on_when_its_terminal_is_closed():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopper().listening():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("supervised", often([[], ["--supervise"]], []))
def test_a_run_whose_terminal_is_closed_saves_its_step(train_overrides, tmp_path, supervised):
    ours, theirs = pty.openpty()
    settings = ("trainer.total_training_steps=100000", "trainer.loggers=[console,jsonl]")
    run = subprocess.Popen(
        [sys.executable, *TRAIN, *train_overrides, *settings, *supervised],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    metrics = tmp_path / "run/metrics.jsonl"
    while run.poll() is None and not (metrics.exists() and len([*read_jsonl(metrics)]) > 2):
        os.read(ours, 1000)
    os.close(ours)
    assert run.wait() == 128 + signal.SIGTERM
    found = folders.newest_undamaged_checkpoint(tmp_path / "run/checkpoints")[0]
    assert folders.verify_checkpoint(found)["step"] == [*read_jsonl(metrics)][-1]["step"] > 1


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
    def stop_in_step_2(batch):
        steps = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
        if steps and steps[-1]["step"] == 1:
            signal.raise_signal(number)

    noted(monkeypatch, stages, "measure_batch", stop_in_step_2)
    settings = [*train_overrides, "trainer.total_training_steps=3", "trainer.seed=3"]
    overrides = ["train", *settings, f"trainer.save_on_stop={str(save).lower()}"]
    assert main(overrides) == 128 + number
    folder = tmp_path / "run"
    assert not (folder / "run.lock").exists()
    found = folders.newest_undamaged_checkpoint(folder / "checkpoints")[0]
    if not save:
        assert found is None
        return
    assert folders.verify_checkpoint(found)["step"] == 2
    monkeypatch.undo()
    assert main(["train", *settings, "trainer.resume_mode=auto"]) == 0
    assert [row["step"] for row in read_jsonl(folder / "metrics.jsonl")] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("place", "steps"),
    [
        ("quadriga.trainer.fine_tuning.OneGroupTrainer.init_workers", []),
        ("quadriga.trainer.record.RunRecord.log_validation", [1]),
        ("quadriga.workers.actor_rollout_ref.SFTWorker.export_hf", [1, 2]),
    ],
    ids=["before the first step", "in a validation", "during the export"],
)
def test_a_signal_at_any_place_leaves_a_run_that_can_be_resumed(
    tiny_task, tmp_path, monkeypatch, place, steps
) -> None:
    runs = six_steps("sft", tiny_task, tmp_path)
    settings = ("trainer.total_training_steps=2", "trainer.test_freq=1", "trainer.save_freq=1")
    cls, _, name = place.rpartition(".")

    def interrupt(*_):
        monkeypatch.undo()
        signal.raise_signal(signal.SIGTERM)

    noted(monkeypatch, pkgutil.resolve_name(cls), name, interrupt)
    assert main(["sft", *runs.given("run", *settings)]) == 143
    assert not (tmp_path / "run/run.lock").exists()
    found = folders.complete_checkpoints(tmp_path / "run" / "checkpoints")
    assert [step for step, _ in found] == steps
    for step in steps:  # its validation was finished
        state = folders.read_marker(runs.checkpoint("run", step))
        assert state["validation"]
    assert not (tmp_path / "run/model").exists()
    runs.run("run", *settings, "trainer.resume_mode=auto")
    assert [row["step"] for row in runs.metrics("run")] == [1, 2]
    assert (tmp_path / "run/model").exists()


FAILING = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["split"] == "test":
        raise ERROR("the server of the judge is down")
    return 1.0
"""


@pytest.mark.parametrize("raised", [RuntimeError, KeyboardInterrupt])
def test_a_last_validation_that_fails_or_is_interrupted_loses_no_step(
    run, tmp_path, raised
) -> None:
    (tmp_path / "rule.py").write_text(FAILING.replace("ERROR", raised.__name__))
    settings = [f"reward.path={tmp_path / 'rule.py'}", "reward.on_failure=fail",
                "trainer.val_before_train=false", "trainer.total_training_steps=1"]  # fmt: skip
    with pytest.raises((RewardError, KeyboardInterrupt), match="the server of the judge is down"):
        run(*settings)
    checkpoint = tmp_path / "run" / "checkpoints" / "global_step_1"
    assert not folders.read_marker(checkpoint)["validation"]
    (row,) = run(*settings, "trainer.resume_mode=auto")
    assert row["step"] == 1 and "actor/loss" in row and "val/score" not in row
    assert (tmp_path / "run" / "model").exists()


def test_a_run_with_default_settings_saves_by_time_and_at_the_end(run, tmp_path) -> None:
    quick = ("trainer.val_before_train=false", "data.val_files=[]")
    run(*quick, "trainer.save_interval_s=0.001")
    assert [s for s, _ in folders.complete_checkpoints(tmp_path / "run" / "checkpoints")] == [1, 2]
    run(*quick, f"trainer.default_local_dir={tmp_path / 'end'}")
    assert [s for s, _ in folders.complete_checkpoints(tmp_path / "end" / "checkpoints")] == [2]


def moment(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


def test_a_run_saves_and_stops_before_its_deadline_and_when_the_stop_file_exists(
    train_overrides, tmp_path, monkeypatch, caplog
) -> None:
    file = tmp_path / "notice"
    more = ("trainer.total_training_steps=3", "data.val_files=[]", "trainer.overwrite=true")
    for setting in (f"trainer.deadline={moment(600)}", f"trainer.stop_file={file}"):
        if "file" in setting:
            noted(monkeypatch, stages, "measure_batch", lambda _: file.touch())
        else:  # no time for a second step and stop_grace_s=60
            monkeypatch.setattr(checkpoints, "seconds_left", lambda trainer: 60.0)
        assert main(["train", *train_overrides, *more, setting]) == 143
        assert [s for s, _ in folders.complete_checkpoints(tmp_path / "run" / "checkpoints")] == [1]
        assert f"with a checkpoint: {setting.partition('=')[0]}" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("settings", "message"),
    {
        (f"trainer.deadline={moment(-30)}",): r"trainer\.deadline=\S+ is over since \d+ s; set",
        (
            "trainer.stop_grace_s=9e5",
            f"trainer.deadline={moment(6e5)}",
        ): r"is in \d+ s, but .*=900000",
        ("trainer.deadline=tomorrow",): "tomorrow is no moment; write it as 2026-11-27T06:00",
        (f"trainer.stop_file={Path(__file__)}",): "exists already, so the run would stop after one",
        (f"trainer.stop_file=/{'a' * 300}",): "cannot be looked for: File name too long; choose",
    }.items(),
)
def test_a_run_that_is_asked_to_stop_already_is_refused(refused, settings, message) -> None:
    assert re.search(message, refused(*settings))


def test_a_stop_file_that_cannot_be_read_for_a_moment_ends_no_run(tmp_path) -> None:
    request = stopper()
    request.file = tmp_path / ("a" * 300)  # its folder answers with an error of the system
    request.look()
    assert not request.requested
