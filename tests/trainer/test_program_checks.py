"""A trainer that a program makes has the checks of `quadriga train`, before anything is loaded."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quadriga.compat.verl.training.trainer import RayPPOTrainer as VerlTrainer
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.data import PromptLoader
from quadriga.errors import ConfigError, DataError, InputError, ModelError
from quadriga.protocol import DataProto
from quadriga.trainer import ppo
from quadriga.trainer.ingredients import load_ingredients
from quadriga.trainer.ppo import RayPPOTrainer
from quadriga.trainer.roles.registry import Role
from quadriga.trainer.stages import BatchReward
from quadriga.workers import ActorRolloutRefWorker

ACTOR = "actor_rollout_ref.actor"
REFUSED = {
    f"{ACTOR}.ppo_mini_batch_size=3": (ConfigError, "3 does not divide data.train_batch_size=8"),
    "trainer.loggers=[jsonll]": (InputError, "did you mean 'jsonl'"),
    "data.train_files=[absent.parquet]": (DataError, r"data\.train_files: no such file"),
    "actor_rollout_ref.model.path=absent": (ModelError, "absent does not exist"),
    "trainer.resume_mode=absent": (InputError, "absent"),
}


@pytest.fixture
def loads_nothing(monkeypatch) -> None:
    def load(config: TrainConfig, reward: BatchReward | None = None) -> None:
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


def prompts_only(folder: Path) -> list[str]:
    """Settings with rows that hold nothing but prompts, for training and validation."""
    file = folder / "prompts.jsonl"
    row = {"prompt": [{"role": "user", "content": "1 and 2?"}]}
    file.write_text(f"{json.dumps(row)}\n" * 8)
    return [f"data.train_files=[{file}]", f"data.val_files=[{file}]"]


@pytest.mark.parametrize("names", ["quadriga", "verl"])
def test_rows_need_no_rule_if_the_program_scores_them(train_overrides, tmp_path, names) -> None:
    config = load_config(TrainConfig, [*train_overrides, *prompts_only(tmp_path)])
    trainer = {"quadriga": RayPPOTrainer, "verl": VerlTrainer}[names]
    with pytest.raises(DataError, match="row 0 cannot be scored"):
        trainer(config)

    def own(data, return_dict=False):
        ones = torch.ones(data.batch["responses"].shape)
        return ones if names == "verl" else DataProto.from_dict({"token_level_scores": ones})

    with closing(trainer(config, reward_fn=own)) as made:
        assert len(made.ingredients.train_loader) == 1


NOT_FITTING = {
    f"{ACTOR}.engine.max_tokens_per_micro_batch=1": (ConfigError, "below the longest sequence"),
    "actor_rollout_ref.rollout.sampling.stop_token_ids=[99999]": (
        ConfigError,
        "names .99999., outside the voc",
    ),
    "data.max_response_length=600": (ModelError, "computes at most 512"),
}


@pytest.mark.parametrize("override", NOT_FITTING)
def test_prompts_that_a_program_gives_are_compared_with_the_model(
    train_overrides, override
) -> None:
    given = load_ingredients(load_config(TrainConfig, train_overrides))
    kind, message = NOT_FITTING[override]
    with pytest.raises(kind, match=message):
        RayPPOTrainer(load_config(TrainConfig, [*train_overrides, override]), given)


def test_a_dataset_that_does_not_know_its_lengths_is_not_compared(train_overrides) -> None:
    given = load_ingredients(load_config(TrainConfig, train_overrides))

    class Rows:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int):
            raise AssertionError("a row is read before the first step")

        collate = __getitem__

    unknown = replace(given, train_loader=PromptLoader(Rows(), 8), val_loader=None)
    budget = f"{ACTOR}.engine.max_tokens_per_micro_batch=1"
    RayPPOTrainer(load_config(TrainConfig, [*train_overrides, budget]), unknown).close()


def test_a_warm_up_beyond_the_steps_of_the_data_is_refused(train_overrides) -> None:
    more = ["trainer.total_training_steps=null", f"{ACTOR}.optim.lr_warmup_steps=17"]
    config = load_config(TrainConfig, [*train_overrides, *more])
    # 64 prompts in batches of 8, two mini-batches each.
    with pytest.raises(ConfigError, match="lr_warmup_steps=17 is more than the 16 optimizer steps"):
        RayPPOTrainer(config)
