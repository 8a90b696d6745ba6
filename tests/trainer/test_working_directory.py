"""A trainer keeps its paths if the working directory changes after it is made."""

from __future__ import annotations

import logging
import os
from contextlib import closing

import pytest
from fine_tuning_cases import six_steps
from run_cases import two_steps

from quadriga.config.commands import SFTConfig
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.observability.jsonl import read_jsonl
from quadriga.trainer.fine_tuning import SFTTrainer
from quadriga.trainer.ppo import RayPPOTrainer


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
