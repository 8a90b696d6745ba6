"""What the working directory is for a run: its paths are kept, and its files are no modules."""

import logging
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from fine_tuning_cases import six_steps
from run_cases import two_steps

from quadriga.config.commands import SFTConfig
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.observability.jsonl import read_jsonl
from quadriga.trainer.fine_tuning import SFTTrainer
from quadriga.trainer.ppo import RayPPOTrainer

PROGRAM = """
import sys, own_module
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.trainer.main import run_training
run_training(load_config(TrainConfig, sys.argv[1:]))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("start", ["quadriga", "program"])
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_a_run_in_a_folder_with_hostile_files(backend, start, train_overrides, tmp_path) -> None:
    """None of them runs. The folder of a program is searched, in reward processes too."""
    (downloads := tmp_path / "downloads").mkdir()
    for name in ("psutil", "torch", "json", "numpy", "pickle", "socket", "logging", "quadriga"):
        (downloads / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write('{name}')"
        )
    (tmp_path / "own_module.py").write_text("SCORE = 3.0")
    (tmp_path / "my_train.py").write_text(PROGRAM)
    first = "" if start == "quadriga" else "    import own_module\n"
    (tmp_path / "rule.py").write_text(f"def compute_score(*args, **more):\n{first}    return 1.0")
    program = {"quadriga": [Path(sys.executable).with_name("quadriga"), "train"],
               "program": [sys.executable, tmp_path / "my_train.py"]}[start]  # fmt: skip
    more = [f"trainer.backend={backend}", f"reward.path={tmp_path}/rule.py",
            "reward.num_processes=1", "reward.on_failure=fail"]  # fmt: skip
    done = subprocess.run([*program, *train_overrides, *more], cwd=downloads, text=True,
                          capture_output=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("command", ["train", "sft"])
def test_relative_paths_begin_where_the_trainer_is_made(
    command, tiny_task, tmp_path, monkeypatch, caplog
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "task").symlink_to(tiny_task.folder)
    (tmp_path / "rule.py").write_text("def compute_score(*args, **more):\n    return 1.0\n")
    if command == "train":
        trainer, kind, section = RayPPOTrainer, TrainConfig, "actor_rollout_ref.model"
        given = [*two_steps(tiny_task, tmp_path), "reward.path=rule.py"]
    else:
        trainer, kind, section = SFTTrainer, SFTConfig, "model"
        given = six_steps("sft", tiny_task, tmp_path).settings
    given = [text.replace(str(tiny_task.folder), "task") for text in given]
    given += [
        "trainer.experiment_name=name",
        "trainer.default_local_dir=${trainer.experiment_name}",
    ]
    caplog.set_level(logging.WARNING)
    for steps in (1, 2):
        os.chdir(tmp_path)
        more = ["trainer.resume_mode=auto", f"trainer.total_training_steps={steps}"]
        with closing(trainer(load_config(kind, [*given, *more]))) as run:
            os.chdir(tmp_path / "other")
            run.fit()
        assert not list((tmp_path / "other").iterdir())
        rows = read_jsonl(tmp_path / "name/metrics.jsonl")
        assert [row["step"] for row in rows if row["step"]] == [1, 2][:steps]
    written = (tmp_path / "name/config.yaml").read_text()
    assert "path: task/base" in written and "dir: ${trainer.experiment_name}" in written
    assert f"{section}.path: " not in caplog.text
