"""Every file in examples/recipes passes the checks of its command, and is used as it says."""

import re
import shlex
from pathlib import Path

import pytest

from quadriga.cli.main import parse
from quadriga.cli.make_data import run_make_data
from quadriga.config.commands import (
    ArithmeticDataConfig,
    EvalConfig,
    GenerateConfig,
    RMConfig,
    SFTConfig,
)
from quadriga.config.loading import load_config
from quadriga.config.plan import batch_plan
from quadriga.config.role_ranks import num_ranks
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError
from quadriga.trainer.checks import settings
from quadriga.trainer.evaluation import run_generation
from quadriga.trainer.main import run_training

ROOT = Path(__file__).parents[2]
TINY = (
    "train_size=32", "val_size=4", "sft_size=4", "max_number=5",
    "hidden_size=32", "num_layers=2", "num_heads=2", "intermediate_size=64",
)  # fmt: skip
RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))


def commands(path):
    """The `quadriga …` lines of the comment at the top of a recipe."""
    top = [line[1:] for line in path.read_text().splitlines() if line.startswith("#")]
    joined = "\n".join(top).replace("\\\n", " ")
    return [line.split() for line in joined.splitlines() if line.strip().startswith("quadriga ")]


def command_of(path):
    """The command that reads the recipe, as the command line parses it."""
    found = [parse(words[1:]) for words in commands(path)]
    [own] = [command for command in found if command.file is not None]
    return own


def check(config):
    """Check settings as the command does before it starts a process."""
    if isinstance(config, TrainConfig):
        settings.check_train_settings(config)
        plan = batch_plan(config)
        assert plan.sequences % num_ranks(config, "actor") == 0
    elif isinstance(config, SFTConfig | RMConfig):
        settings.check_fine_tuning_settings(config)
    elif isinstance(config, EvalConfig):
        settings.check_eval_settings(config)
    else:
        assert isinstance(config, GenerateConfig)
        settings.check_generate_settings(config)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_is_accepted_by_its_command(path):
    command = command_of(path)
    assert (ROOT / command.file).samefile(path)
    check(load_config(command.command.settings, command.overrides, path))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_a_recipe_leaves_the_files_of_the_user_to_the_command_line(path):
    """A model or a data file in a recipe would be that of another machine."""
    assert not re.search(r"^\s*(path|train_files|val_files|data_files):", path.read_text(), re.M)
    words = shlex.join(command_of(path).overrides)
    assert "model.path=" in words and "files=" in words


def test_there_are_recipes_for_training_and_for_generation():
    names = {command_of(path).command.name for path in RECIPES}
    assert names == {"train", "sft", "rm", "generate", "eval"}


def test_a_faulty_recipe_is_reported(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("data:\n  train_batch_sise: 8\n")
    with pytest.raises(ConfigError, match=r"did you mean data\.train_batch_size"):
        load_config(TrainConfig, (), recipe)
    recipe.write_text("algorithm:\n  adv_estimator: grqo\nactor_rollout_ref: {rollout: {n: 2}}\n")
    with pytest.raises(ConfigError, match="did you mean grpo"):
        check(load_config(TrainConfig, (), recipe))


def test_the_laptop_recipe_trains_a_model_from_which_the_greedy_recipe_generates(tmp_path):
    data = (f"output={tmp_path / 'data'}", f"model_output={tmp_path / 'base'}", *TINY)
    run_make_data(load_config(ArithmeticDataConfig, data))
    folder = tmp_path / "run"
    run_training(
        load_config(
            TrainConfig,
            (
                f"actor_rollout_ref.model.path={tmp_path / 'base'}",
                f"data.train_files={tmp_path / 'data' / 'train.parquet'}",
                "actor_rollout_ref.rollout.n=2",
                "trainer.total_training_steps=1",
                "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
                "trainer.loggers=[jsonl]",
                f"trainer.default_local_dir={folder}",
            ),
            ROOT / "examples" / "recipes" / "train_laptop.yaml",
        )
    )
    answers = run_generation(
        load_config(
            GenerateConfig,
            (
                f"model.path={folder / 'model'}",
                f"data_files={tmp_path / 'data' / 'test.parquet'}",
                "max_response_length=8",
                "trainer.device=cpu",
            ),
            ROOT / "examples" / "recipes" / "generate_greedy.yaml",
        )
    )
    assert len(answers) == 4
