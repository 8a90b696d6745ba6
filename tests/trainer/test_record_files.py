"""The record of a run closes every file that it has opened, whatever fails."""

from contextlib import nullcontext

import pytest

from quadriga.checkpoint.remote import Uploads
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError
from quadriga.observability import trackers
from quadriga.observability.jsonl import JsonlFile
from quadriga.trainer import record
from quadriga.trainer.record import RunRecord


class Broken:
    """A tracker of a user that raises when it is made, or when it is closed."""

    def __init__(self, fails_at):
        if fails_at == "start":
            raise ConfigError("no service")

    def log(self, step, metrics):
        raise AssertionError("no step has ended")

    def close(self):
        raise RuntimeError("no service")


@pytest.mark.parametrize("fails_at", ["start", "end"])
def test_a_tracker_that_fails_leaves_no_file_open(tmp_path, monkeypatch, fails_at):
    files: list[str] = []

    class Log(JsonlFile):
        def __init__(self, path):
            files.append("opened")
            super().__init__(path)

        def close(self):
            files.append("closed")
            super().close()

    monkeypatch.setattr(record, "JsonlFile", Log)
    monkeypatch.setitem(trackers.TRACKERS, "mine", lambda run: Broken(fails_at))
    settings = [f"trainer.default_local_dir={tmp_path}/run", "trainer.loggers=[mine]"]
    config = load_config(TrainConfig, settings)
    raised = pytest.raises(ConfigError, match="no service")
    with (
        raised if fails_at == "start" else nullcontext(),  # the run does not end with a tracker
        RunRecord(config, 3, tokenizer=None, uploads=Uploads(config.trainer)),
    ):
        assert fails_at == "end"
    assert files == ["opened", "closed"]
    assert not (tmp_path / "run/run.lock").exists()


def test_a_report_that_cannot_be_written_is_a_warning_and_ends_no_run(
    tmp_path, monkeypatch, caplog
):
    def full(folders, page):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record, "write_report", full)
    config = load_config(TrainConfig, [f"trainer.default_local_dir={tmp_path}/run"])
    with RunRecord(config, 3, tokenizer=None, uploads=Uploads(config.trainer)):
        pass
    assert "the report is not written: OSError: [Errno 28] No space left" in caplog.text
