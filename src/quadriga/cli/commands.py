"""The commands, one literal table. What a command needs is imported when it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quadriga.config.schema import (
    AlgorithmsConfig,
    ArithmeticDataConfig,
    DemoConfig,
    GenerateConfig,
    SFTConfig,
    TrainConfig,
)


@dataclass(frozen=True)
class Command:
    """`name` may be two words. `settings`: the settings it reads, None for none."""

    name: str
    summary: str
    action: Callable[[Any], None]
    settings: type | None = None

    def run(self, invocation: Invocation) -> None:
        """Read the settings and act, or only show them."""
        if self.settings is None:
            self.action(None)
            return
        from quadriga.config.loading import load_config, to_yaml

        config: Any = load_config(self.settings, invocation.overrides, invocation.file)
        if invocation.print_config:
            print(to_yaml(config), end="")
        else:
            self.action(config)

    def help_text(self) -> str:
        """Every setting with its default."""
        if self.settings is None:
            return ""
        from quadriga.config.describe import help_text

        return f"settings, with their defaults:\n{help_text(self.settings())}"


@dataclass(frozen=True)
class Invocation:
    """A command line, read."""

    command: Command
    overrides: tuple[str, ...] = ()
    file: str | None = None
    print_config: bool = False


def train(config: TrainConfig) -> None:
    """Reinforcement learning."""
    from quadriga.trainer.main import run_training

    run_training(config)


def sft(config: SFTConfig) -> None:
    """Supervised fine-tuning."""
    from quadriga.trainer.sft import run_sft

    run_sft(config)


def generate(config: GenerateConfig) -> None:
    """Answers, to a file or to the terminal."""
    from quadriga.cli.show import show_answers
    from quadriga.config.checks import check_generate_settings
    from quadriga.trainer.generate import run_generation

    check_generate_settings(config)
    answers = run_generation(config)
    if config.output is None:
        show_answers(answers)
    else:
        print(f"{len(answers)} prompts answered: {config.output}")


def data_make(config: ArithmeticDataConfig) -> None:
    """Data files, and a tiny model where one is asked for."""
    from quadriga.trainer.make_data import run_make_data

    run_make_data(config)


def demo(config: DemoConfig) -> None:
    """The whole way, small."""
    from quadriga.trainer.demo import run_demo

    run_demo(config)


def plan(config: TrainConfig) -> None:
    """A run's arithmetic; starts nothing."""
    from quadriga.cli.show import show_plan

    show_plan(config)


def algorithms(config: AlgorithmsConfig) -> None:
    """The tables of estimators, losses and the rest."""
    from quadriga.algorithms.user_files import load_user_file
    from quadriga.cli.show import show_algorithms

    for path in config.user_files:
        load_user_file(path)
    show_algorithms()


def doctor(_: None) -> None:
    """What is installed here."""
    from quadriga.cli.show import show_doctor

    show_doctor()


COMMANDS = (
    Command("train", "train a model by reinforcement learning", train, TrainConfig),
    Command("sft", "fine-tune a model on answers", sft, SFTConfig),
    Command("generate", "answer a prompt or files of prompts", generate, GenerateConfig),
    Command("data make", "make arithmetic problems, and a tiny model", data_make,
            ArithmeticDataConfig),
    Command("plan", "show how a training run's batches divide", plan, TrainConfig),
    Command("algorithms", "show advantage estimators, losses and their settings", algorithms,
            AlgorithmsConfig),
    Command("doctor", "show what is installed and what this machine offers", doctor),
    Command("demo", "make data and a model, and train it", demo, DemoConfig),
)  # fmt: skip
