"""A trainer that a program makes has the checks of `quadriga train`, before anything is loaded."""

from __future__ import annotations

import pytest

from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError, DataError, InputError, ModelError
from quadriga.trainer import ppo
from quadriga.trainer.placement import Role
from quadriga.trainer.ppo import RayPPOTrainer
from quadriga.trainer.run.ingredients import load_ingredients
from quadriga.workers import ActorRolloutRefWorker

ACTOR = "actor_rollout_ref.actor"
REFUSED = {
    f"{ACTOR}.ppo_mini_batch_size=3": (ConfigError, "3 does not divide data.train_batch_size=8"),
    f"{ACTOR}.engine.name=megatron": (ConfigError, r"actor\.engine\.name=megatron"),
    "trainer.loggers=[jsonll]": (InputError, "did you mean jsonl"),
    "data.train_files=[absent.parquet]": (DataError, r"data\.train_files: no such file"),
    "data.val_files=[absent.parquet]": (DataError, r"data\.val_files: no such file"),
    "actor_rollout_ref.model.path=absent": (ModelError, "absent does not exist"),
    "reward.path=absent.py": (InputError, r"absent\.py"),
    "trainer.resume_mode=absent": (InputError, "absent"),
    "trainer.device_memory_gb=0.001": (ConfigError, "but 0.001 GiB are trainer.device_memory_gb"),
}


@pytest.fixture
def loads_nothing(monkeypatch) -> None:
    def load(config: TrainConfig) -> None:
        raise AssertionError("the data were loaded before the checks")

    monkeypatch.setattr(ppo, "load_ingredients", load)


@pytest.mark.parametrize("override", REFUSED)
def test_what_the_command_refuses_is_refused(train_overrides, loads_nothing, override) -> None:
    config = load_config(TrainConfig, [*train_overrides, override])
    kind, message = REFUSED[override]
    with pytest.raises(kind, match=message):
        RayPPOTrainer(config)


def test_a_folder_with_a_run_is_refused(train_overrides, loads_nothing, tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(InputError, match="overwrite"):
        RayPPOTrainer(load_config(TrainConfig, train_overrides))


def test_what_a_program_gives_itself_is_not_read_from_the_settings(train_overrides) -> None:
    given = load_ingredients(load_config(TrainConfig, train_overrides))
    more = ["data.train_files=[absent.parquet]", "reward.path=absent.py"]
    config = load_config(TrainConfig, [*train_overrides, *more])
    RayPPOTrainer(config, given).close()

    class Own(ActorRolloutRefWorker): ...

    config = load_config(TrainConfig, [*train_overrides, "actor_rollout_ref.model.path=absent"])
    with pytest.raises(ModelError, match="absent does not exist"):
        RayPPOTrainer(config, given)
    config = load_config(TrainConfig, [*train_overrides, "trainer.device_memory_gb=0.001"])
    RayPPOTrainer(config, given, role_worker_mapping={Role.ActorRollout: Own}).close()


def test_a_warm_up_beyond_the_steps_of_the_data_is_refused(train_overrides) -> None:
    more = ["trainer.total_training_steps=null", f"{ACTOR}.optim.lr_warmup_steps=17"]
    config = load_config(TrainConfig, [*train_overrides, *more])
    # 64 prompts in batches of 8, two mini-batches each.
    with pytest.raises(ConfigError, match="lr_warmup_steps=17 is more than the 16 optimizer steps"):
        RayPPOTrainer(config)
