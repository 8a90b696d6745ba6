"""The table of commands. A command imports what it needs when it runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
from quadriga.lazy import imported

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Invocation:
    """A parsed command line. `verl`: a settings file of verl; the overrides are verl's then."""

    command: Command
    overrides: tuple[str, ...] = ()
    file: str | None = None
    print_config: bool = False
    verl: str | None = None


@dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        name: one or two words.
        target: "module:function" that is called with the settings.
        settings: their class; None for a command without settings.
        writes_files: what it prints is not its result, so it has not succeeded if it ends early.
        variants: first word after the name → the settings that follow in place of `settings`.
    """

    name: str
    summary: str
    target: str
    settings: type[DataclassInstance] | None = None
    writes_files: bool = False
    variants: Mapping[str, type[DataclassInstance]] = field(default_factory=dict)

    def help_text(self) -> str:
        """Return all settings of the command with their defaults, or "" if it has none."""
        if self.settings is None:
            return ""
        from quadriga.config.describe import help_text

        return f"settings and their defaults:\n{help_text(self.settings())}"

    def run(self, invocation: Invocation) -> None:
        """Load the settings and call the function, or only print them."""
        if self.settings is None:
            imported(self.target)()
            return
        from quadriga.config.writing import to_yaml

        config = self._load(invocation)
        if invocation.print_config:
            print(to_yaml(config), end="")
        else:
            imported(self.target)(config)

    def _load(self, invocation: Invocation) -> DataclassInstance:
        """Return the settings of a command line; those of a training run with the sections of
        roles that the user's files add."""
        from quadriga.config.loading import load_config

        assert self.settings is not None
        settings, overrides = self.settings, invocation.overrides
        if overrides and overrides[0] in self.variants:
            settings, overrides = self.variants[overrides[0]], overrides[1:]
        if invocation.verl is not None:
            from quadriga.compat.verl_settings import read_verl
            from quadriga.compat.verl_table import TRAIN
            from quadriga.errors import ConfigError

            if invocation.file is not None:
                raise ConfigError(
                    "--verl and --config name two settings files; pass one", key="--verl"
                )
            translation = read_verl(settings, TRAIN, invocation.verl, overrides)
            print(translation.report(), file=sys.stderr)
            return translation.config
        if settings is TrainConfig:
            from quadriga.trainer.roles.registry import load_train_config

            return load_train_config(overrides, invocation.file)
        return load_config(settings, overrides, invocation.file)


PLANNED: dict[str, type[DataclassInstance]] = {
    "train": TrainConfig,
    "sft": SFTConfig,
    "rm": RMConfig,
    "generate": GenerateConfig,
}
"""The word after `plan` → the settings that follow."""

_SHOW = "quadriga.cli.show"
COMMANDS = (
    Command(
        "train",
        "Train a model with reinforcement learning",
        "quadriga.trainer.main:run_training",
        TrainConfig,
        writes_files=True,
    ),
    Command(
        "sft",
        "Fine-tune a model on reference answers",
        "quadriga.trainer.fine_tuning.sft:run_sft",
        SFTConfig,
        writes_files=True,
    ),
    Command(
        "rm",
        "Train a reward model on pairs of responses",
        "quadriga.trainer.fine_tuning.rm:run_rm",
        RMConfig,
        writes_files=True,
    ),
    Command(
        "generate",
        "Generate responses to a prompt or to files of prompts",
        f"{_SHOW}:show_generation",
        GenerateConfig,
    ),
    Command(
        "eval",
        "Generate or read responses to files of prompts, and score them",
        f"{_SHOW}:show_evaluation",
        EvalConfig,
        writes_files=True,
    ),
    Command(
        "data make",
        "Make arithmetic problems, and optionally a tiny model",
        "quadriga.cli.make_data:run_make_data",
        ArithmeticDataConfig,
        writes_files=True,
    ),
    Command(
        "plan",
        "Show batches and memory of a run: plan, plan sft, plan rm, plan generate",
        f"{_SHOW}:show_plan",
        TrainConfig,
        variants=PLANNED,
    ),
    Command(
        "algorithms",
        "Show estimators, losses and their settings",
        f"{_SHOW}:show_algorithms",
        AlgorithmsConfig,
    ),
    Command(
        "doctor",
        "Show installed packages and the resources of this machine",
        f"{_SHOW}:show_doctor",
    ),
    Command(
        "demo",
        "Make data and a tiny model, and train it",
        "quadriga.cli.demo:run_demo",
        DemoConfig,
        writes_files=True,
    ),
)
