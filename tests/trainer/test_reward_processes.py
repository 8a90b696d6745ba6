"""`close` of a trainer ends the processes of the reward function, also after a failure."""

from __future__ import annotations

import psutil
import pytest

from processes import command_line
from quadriga.config.commands import SFTConfig
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import RewardError
from quadriga.trainer.fine_tuning.sft import SFTTrainer
from quadriga.trainer.main import run_training
from quadriga.trainer.ppo import RayPPOTrainer

RULE = """
import os, time

def score(solution_str, **_):
    return float(os.getpid())

def fail(**_):
    raise ValueError("no score")
"""


def pool_processes() -> list[psutil.Process]:
    own = psutil.Process().children(recursive=True)
    return [p for p in own if "quadriga.rewards.pool_worker" in command_line(p)]


@pytest.fixture
def rule(tmp_path):
    file = tmp_path / "rule.py"
    file.write_text(RULE)
    return f"reward.path={file}"


def test_training_ends_them(train_overrides, rule) -> None:
    config = load_config(TrainConfig, [*train_overrides, rule, "reward.name=score"])
    trainer = RayPPOTrainer(config)
    trainer.fit()
    assert len(pool_processes()) == 4  # two processes, each with its supervisor
    trainer.close()
    assert pool_processes() == []


def test_a_failed_run_ends_them(train_overrides, rule) -> None:
    more = [rule, "reward.name=fail", "reward.on_failure=fail"]
    with pytest.raises(RewardError) as caught:  # its traceback keeps the trainer alive
        run_training(load_config(TrainConfig, [*train_overrides, *more]))
    assert pool_processes() == []
    assert caught.value.status == "raised"


def test_fine_tuning_ends_them(tiny_task, rule, tmp_path) -> None:
    config = load_config(
        SFTConfig,
        [
            f"model.path={tiny_task.model}",
            f"data.train_files={tiny_task.data('sft')}",
            f"data.val_files={tiny_task.data('test')}",
            "trainer.total_training_steps=1",
            "trainer.val_size=4",
            "trainer.backend=local",
            "trainer.n_gpus_per_node=1",
            f"trainer.default_local_dir={tmp_path / 'run'}",
            "trainer.loggers=[jsonl]",
            rule,
            "reward.name=score",
        ],
    )
    trainer = SFTTrainer(config)
    trainer.fit()
    assert pool_processes()
    trainer.close()
    assert pool_processes() == []
