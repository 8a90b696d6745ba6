"""The table of commands. A command imports what it needs when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from quadriga.config.commands import (
    AlgorithmsConfig,
    ArithmeticDataConfig,
    DemoConfig,
    EvalConfig,
    GenerateConfig,
    RMConfig,
    SFTConfig,
)
from quadriga.config.schema import TrainConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


@dataclass(frozen=True)
class Invocation:
    """A parsed command line."""

    command: Command
    overrides: tuple[str, ...] = ()
    file: str | None = None
    print_config: bool = False
    verl: str | None = None
    """A settings file of verl; the overrides are verl's then."""


@dataclass(frozen=True)
class Command:
    """A command. `name` can be two words; `settings` is None for a command without settings.

    `writes_files`: what it prints is not its result, so it has not succeeded if it ends early.
    """

    name: str
    summary: str
    run: Callable[[Invocation], None]
    settings: type[DataclassInstance] | None = None
    writes_files: bool = False

    def help_text(self) -> str:
        """Return all settings of the command with their defaults, or "" if it has none."""
        if self.settings is None:
            return ""
        from quadriga.config.describe import help_text

        return f"settings and their defaults:\n{help_text(self.settings())}"


def with_settings(
    name: str,
    summary: str,
    action: Callable[[T], None],
    settings: type[T],
    *,
    writes_files: bool = False,
) -> Command:
    """Return a command that loads its settings and calls `action`, or only prints them."""

    def run(invocation: Invocation) -> None:
        from quadriga.config.writing import to_yaml

        if invocation.verl is not None:
            config = translated(settings, invocation)
        else:
            config = load(settings, invocation)
        if invocation.print_config:
            print(to_yaml(config), end="")
        else:
            action(config)

    return Command(name, summary, run, settings, writes_files)


def load(settings: type[T], invocation: Invocation) -> T:
    """Return the settings of a command line; those of a training run with the sections of roles
    that the user's files add."""
    from quadriga.config.loading import load_config

    if settings is TrainConfig:
        from quadriga.trainer.roles.registry import load_train_config

        config = load_train_config(invocation.overrides, invocation.file)
        assert isinstance(config, settings)
        return config
    return load_config(settings, invocation.overrides, invocation.file)


def translated(settings: type[T], invocation: Invocation) -> T:
    """Return our settings for a command line of verl, and tell what became of it."""
    from quadriga.compat.verl_settings import read_verl
    from quadriga.compat.verl_table import TRAIN
    from quadriga.errors import ConfigError

    if invocation.file is not None:
        raise ConfigError("--verl and --config name two settings files; pass one", key="--verl")
    assert invocation.verl is not None
    translation = read_verl(settings, TRAIN, invocation.verl, invocation.overrides)
    print(translation.report(), file=sys.stderr)
    return translation.config


def train(config: TrainConfig) -> None:
    """Train a policy with reinforcement learning."""
    from quadriga.trainer.main import run_training

    run_training(config)


def sft(config: SFTConfig) -> None:
    """Fine-tune a model on reference answers."""
    from quadriga.trainer.fine_tuning.sft import run_sft

    run_sft(config)


def rm(config: RMConfig) -> None:
    """Train a reward model on pairs of responses."""
    from quadriga.trainer.fine_tuning.rm import run_rm

    run_rm(config)


def generate(config: GenerateConfig) -> None:
    """Generate responses, to a file or to standard output."""
    from quadriga.cli.show import show_responses
    from quadriga.trainer.evaluation.generate import run_generation

    answers = run_generation(config)
    if config.output is None:
        show_responses(answers)
    else:
        print(f"wrote the responses to {len(answers)} prompts to {config.output}")


def evaluate(config: EvalConfig) -> None:
    """Score responses, after generating them unless files hold them."""
    from quadriga.cli.show import show_evaluation
    from quadriga.trainer.evaluation.evaluate import run_evaluation

    show_evaluation(run_evaluation(config), config.confidence)


def data_make(config: ArithmeticDataConfig) -> None:
    """Write data files, and a tiny model if `model_output` is set."""
    from quadriga.cli.make_data import run_make_data

    run_make_data(config)


def demo(config: DemoConfig) -> None:
    """Run data, fine-tuning and reinforcement learning on a small scale."""
    from quadriga.cli.demo import run_demo

    run_demo(config)


def plan(config: TrainConfig | SFTConfig | RMConfig | GenerateConfig) -> None:
    """Print the batches and the memory of a command; no process is started."""
    from quadriga.cli import show

    if isinstance(config, TrainConfig):
        show.show_plan(config)
    elif isinstance(config, GenerateConfig):
        show.show_generation_plan(config)
    else:
        show.show_fine_tuning_plan(config)


PLANNED = {
    "train": with_settings("plan", "", plan, TrainConfig),
    "sft": with_settings("plan sft", "", plan, SFTConfig),
    "rm": with_settings("plan rm", "", plan, RMConfig),
    "generate": with_settings("plan generate", "", plan, GenerateConfig),
}
"""The word after `plan` -> the command whose settings follow."""


def plan_of(invocation: Invocation) -> None:
    """Run `plan`, or `plan` with the word `train`, `sft`, `rm` or `generate`."""
    first = invocation.overrides[0] if invocation.overrides else ""
    named = first in PLANNED
    PLANNED[first if named else "train"].run(
        replace(invocation, overrides=invocation.overrides[int(named) :])
    )


def algorithms(config: AlgorithmsConfig) -> None:
    """Print the registries of estimators, losses and other algorithms."""
    from quadriga.algorithms.user_files import load_user_file
    from quadriga.cli.show import show_algorithms

    for path in config.user_files:
        load_user_file(path)
    show_algorithms()


def doctor(_: Invocation) -> None:
    """Print installed packages and the resources of this machine."""
    from quadriga.cli.show import show_doctor

    show_doctor()


COMMANDS = (
    with_settings(
        "train",
        "Train a model with reinforcement learning",
        train,
        TrainConfig,
        writes_files=True,
    ),
    with_settings(
        "sft", "Fine-tune a model on reference answers", sft, SFTConfig, writes_files=True
    ),
    with_settings(
        "rm",
        "Train a reward model on pairs of responses",
        rm,
        RMConfig,
        writes_files=True,
    ),
    with_settings(
        "generate",
        "Generate responses to a prompt or to files of prompts",
        generate,
        GenerateConfig,
    ),
    with_settings(
        "eval",
        "Generate or read responses to files of prompts, and score them",
        evaluate,
        EvalConfig,
        writes_files=True,
    ),
    with_settings(
        "data make",
        "Make arithmetic problems, and optionally a tiny model",
        data_make,
        ArithmeticDataConfig,
        writes_files=True,
    ),
    Command(
        "plan",
        "Show batches and memory of a run: plan, plan sft, plan rm, plan generate",
        plan_of,
        TrainConfig,
    ),
    with_settings(
        "algorithms", "Show estimators, losses and their settings", algorithms, AlgorithmsConfig
    ),
    Command("doctor", "Show installed packages and the resources of this machine", doctor),
    with_settings(
        "demo", "Make data and a tiny model, and train it", demo, DemoConfig, writes_files=True
    ),
)
