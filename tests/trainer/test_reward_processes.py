"""`close` of a trainer ends the processes of the reward function, also after a failure."""

import psutil
import pytest
from fine_tuning_cases import six_steps

from processes import command_line
from quadriga.config.commands import SFTConfig
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import RewardError
from quadriga.trainer.fine_tuning import SFTTrainer
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
    return [f"reward.path={file}", "reward.num_processes=1"]


def test_training_ends_them(train_overrides, rule) -> None:
    config = load_config(TrainConfig, [*train_overrides, *rule, "reward.name=score"])
    trainer = RayPPOTrainer(config)
    trainer.fit()
    assert len(pool_processes()) == 2  # a process with its supervisor
    trainer.close()
    assert pool_processes() == []


def test_a_failed_run_ends_them(train_overrides, rule) -> None:
    more = [*rule, "reward.name=fail", "reward.on_failure=fail"]
    with pytest.raises(RewardError) as caught:  # its traceback keeps the trainer alive
        run_training(load_config(TrainConfig, [*train_overrides, *more]))
    assert pool_processes() == []
    assert caught.value.status == "raised"


def test_fine_tuning_ends_them(tiny_task, rule, tmp_path) -> None:
    runs = six_steps("sft", tiny_task, tmp_path)
    more = ["trainer.total_training_steps=1", *rule, "reward.name=score"]
    trainer = SFTTrainer(load_config(SFTConfig, runs.given("run", *more)))
    trainer.fit()
    assert pool_processes()
    trainer.close()
    assert pool_processes() == []
