"""The record of a run closes every file that it has opened, whatever fails."""

from __future__ import annotations

import pytest

from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.observability import trackers
from quadriga.observability.jsonl import SampleLog
from quadriga.trainer import record
from quadriga.trainer.record import RunRecord


class FailsToClose:
    """A tracker of a user, whose `close` raises."""

    def log(self, step, metrics): ...

    def close(self):
        raise RuntimeError("no service")


def fail_to_start(run):
    raise RuntimeError("no service")


@pytest.fixture
def files(monkeypatch):
    """What happened to the log of samples."""
    files: list[str] = []

    class Log(SampleLog):
        def __init__(self, path):
            files.append("opened")
            super().__init__(path)

        def close(self):
            files.append("closed")
            super().close()

    monkeypatch.setattr(record, "SampleLog", Log)
    return files


@pytest.fixture
def open_record(tmp_path, monkeypatch):
    """A function that opens the record of a run with the tracker of a factory."""

    def opened(factory) -> RunRecord:
        monkeypatch.setattr(trackers, "TRACKERS", {**trackers.TRACKERS, "mine": factory})
        settings = [f"trainer.default_local_dir={tmp_path}/run", "trainer.loggers=[mine]"]
        return RunRecord.open(load_config(TrainConfig, settings), 3, tokenizer=None)

    return opened


def test_a_tracker_that_cannot_be_closed_leaves_no_file_open(open_record, files, tmp_path):
    with pytest.raises(RuntimeError, match="no service"), open_record(lambda run: FailsToClose()):
        pass
    assert files == ["opened", "closed"]
    assert not (tmp_path / "run/run.lock").exists()


def test_a_tracker_that_cannot_be_created_leaves_no_file_open(open_record, files, tmp_path):
    with pytest.raises(RuntimeError, match="no service"):
        open_record(fail_to_start)
    assert files in ([], ["opened", "closed"])
    assert not (tmp_path / "run/run.lock").exists()
