"""`RunFolder.open` creates, refuses, empties or continues the folder of a run."""

import pytest

from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError, InputError
from quadriga.observability.run_folder import RunFolder


def test_overwrite_removes_the_files_of_the_run_and_no_others(tmp_path):
    folder = RunFolder.open(tmp_path, TrainConfig())
    folder.metrics.write_text('{"step": 1}\n')
    folder.model.mkdir()
    (folder.model / "weights").write_text("x")
    (tmp_path / "notes.txt").write_text("mine")
    folder.close()
    RunFolder.open(tmp_path, TrainConfig(), "overwrite").close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml", "notes.txt"]


def test_resume_keeps_the_steps_up_to_the_checkpoint(tmp_path):
    folder = RunFolder.open(tmp_path, TrainConfig())
    folder.metrics.write_text('{"step": null}\n{"step": 2}\n{"step": 3}\n')
    folder.close()
    again = RunFolder.open(tmp_path, TrainConfig(), "resume")
    again.forget_after(2)
    assert again.metrics.read_text() == '{"step": null}\n{"step": 2}\n'


def test_a_run_without_checkpoint_and_model_may_begin_again(tmp_path):
    folder = RunFolder.open(tmp_path, TrainConfig())
    folder.metrics.write_text('{"step": 1}\n{"step"')
    folder.close()
    (tmp_path / "notes.txt").write_text("mine")
    partial = folder.checkpoints / "global_step_1.partial"
    partial.mkdir(parents=True)
    RunFolder.open(tmp_path, TrainConfig(), "restart").close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "config.yaml", "notes.txt"]


@pytest.mark.parametrize(
    "left", ["model", "model.replaced", "checkpoints/global_step_1", "checkpoints/a.set_aside"]
)
def test_a_run_does_not_begin_again_where_one_has_left_a_checkpoint_or_a_model(tmp_path, left):
    RunFolder.open(tmp_path, TrainConfig()).close()
    (tmp_path / left).mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"but with {tmp_path / left};"):
        RunFolder.open(tmp_path, TrainConfig(), "restart")
    assert (tmp_path / left).is_dir()


def test_a_file_at_the_path_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        RunFolder.open(tmp_path / "run", TrainConfig())
    with pytest.raises(InputError, match="cannot write"):
        RunFolder.open(tmp_path / "run" / "deeper", TrainConfig())
