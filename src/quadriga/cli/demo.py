"""`quadriga demo`: data, a tiny model, a warm start and reinforcement learning, on a laptop.

    problems ─► tiny model ─► supervised warm start ─► reinforcement learning ─► trained model

Each part is an ordinary command with ordinary settings. The demo prints these commands, so that
each part can be repeated with other settings.
"""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from quadriga.cli.make_data import run_make_data
from quadriga.config.commands import ArithmeticDataConfig, DemoConfig, SFTConfig
from quadriga.config.convert import check_values
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.config.secrets import shown
from quadriga.observability.jsonl import read_samples
from quadriga.trainer.checks.settings import check_fine_tuning_settings, check_train_settings
from quadriga.trainer.fine_tuning import run_sft
from quadriga.trainer.main import run_training
from quadriga.trainer.preflight import check_engines

WITHOUT_CRITIC = ("algorithm.filter_groups.enable=true",)
WITH_CRITIC = ("critic.optim.lr=5e-4", "algorithm.lam=0.95")


@dataclass(frozen=True)
class DemoCommand:
    """One command of the demo: `quadriga <command> <overrides>`."""

    command: Literal["data make", "sft", "train"]
    overrides: tuple[str, ...]

    def __str__(self) -> str:
        return f"quadriga {self.command} {shlex.join(self.overrides)}"


def run_demo(config: DemoConfig) -> None:
    """Run every command, then print responses from before and after reinforcement learning.

    Raises:
        InputError: a folder or a setting does not fit. Nothing was started.
    """
    from rich.console import Console

    check_values(config)
    console = Console(highlight=False, markup=False, emoji=False)
    began = time.perf_counter()
    folder = Path(config.output)
    made = (command(config, folder) for command in (data_command, sft_command, train_command))
    data, sft, train = made
    # The commands check their settings too, but the second one only after the first has run.
    fine_tuning = load_config(SFTConfig, sft.overrides)
    check_fine_tuning_settings(fine_tuning)
    training = load_config(TrainConfig, train.overrides)
    check_train_settings(training)
    check_engines(training)

    def announce(title: str, command: DemoCommand) -> None:
        console.print(f"\n{title}", style="bold")
        console.print(f"$ {command}", style="dim", soft_wrap=True)

    announce("1/3  arithmetic problems, and a model with random weights", data)
    run_make_data(load_config(ArithmeticDataConfig, data.overrides))
    announce("2/3  warm start: supervised steps on worked examples, most of them wrong", sft)
    accuracy = run_sft(fine_tuning).validation.get("val/accuracy")
    announce("3/3  reinforcement learning: the reward is 1 for the right number", train)
    run_training(training)

    show_answers(console, folder / "train" / "samples.jsonl")
    warm = "" if accuracy is None else f"; accuracy after the warm start {accuracy:.0%}"
    console.print(f"time of the demo: {time.perf_counter() - began:.0f}s{warm}")
    question = "Tom has 3 apples. He buys 4 more. How many apples does Tom have now?"
    console.print("try the model:")
    model = folder / "train" / "model"
    console.print(f'  quadriga generate model.path={model} prompt="{question}"', soft_wrap=True)


def data_command(config: DemoConfig, folder: Path) -> DemoCommand:
    """Make problems of one to three steps, and a model of a million parameters.

    Four of five worked examples stop after the first step and give its result as the answer. A
    model that imitates them solves mostly one-step problems; the reward teaches it the others.
    """
    settings = "max_number=9 max_total=9 max_steps=3 sft_size=4096 sft_careful=0.2 hidden_size=192"
    shape = "num_layers=2 num_heads=6 num_kv_heads=3 intermediate_size=512"
    paths = (f"output={folder / 'data'}", f"model_output={folder / 'base'}")
    words = (*settings.split(), *shape.split(), f"seed={config.seed}")
    return DemoCommand("data make", (*paths, *words))


def sft_command(config: DemoConfig, folder: Path) -> DemoCommand:
    """Train the model on the worked examples."""
    return DemoCommand(
        "sft",
        (
            f"model.path={folder / 'base'}",
            f"data.train_files=[{folder / 'data' / 'sft.parquet'}]",
            f"data.val_files=[{folder / 'data' / 'test.parquet'}]",
            "data.train_batch_size=64",
            *_optimizer("optim", "2e-3", warmup=10),
            "optim.betas=[0.9,0.99]",
            "trainer.total_epochs=5",
            "trainer.total_training_steps=280",
            "trainer.test_freq=70",
            "trainer.max_response_length=26",
            *_shared(config, folder / "sft"),
        ),
    )


def train_command(config: DemoConfig, folder: Path) -> DemoCommand:
    """Train with GRPO, or with PPO and a critic (`adv_estimator=gae`). Adapters take larger
    steps."""
    policy = "actor_rollout_ref"
    if config.lora_rank is None:
        trained = _optimizer(f"{policy}.actor.optim", "3e-4", warmup=5)
    else:
        rank = f"{policy}.model.lora.rank={config.lora_rank}"
        trained = (rank, *_optimizer(f"{policy}.actor.optim", "3e-3", warmup=5))
    return DemoCommand(
        "train",
        (
            f"algorithm.adv_estimator={config.adv_estimator}",
            f"{policy}.model.path={folder / 'sft' / 'model'}",
            f"data.train_files=[{folder / 'data' / 'train.parquet'}]",
            f"data.val_files=[{folder / 'data' / 'test.parquet'}]",
            "data.train_batch_size=32",
            "data.max_response_length=26",
            f"{policy}.rollout.n=8",
            f"{policy}.rollout.name={config.rollout}",
            f"{policy}.actor.ppo_mini_batch_size=16",
            *trained,
            f"{policy}.actor.policy_loss.clip_ratio_high=0.28",
            *(WITH_CRITIC if config.adv_estimator == "gae" else WITHOUT_CRITIC),
            "trainer.total_training_steps=90",
            "trainer.test_freq=10",
            *_shared(config, folder / "train"),
        ),
    )


def _optimizer(prefix: str, lr: str, warmup: int) -> tuple[str, ...]:
    return (
        f"{prefix}.lr={lr}",
        f"{prefix}.lr_scheduler=linear",
        f"{prefix}.lr_warmup_steps={warmup}",
        f"{prefix}.min_lr_ratio=0.1",
    )


def _shared(config: DemoConfig, folder: Path) -> tuple[str, ...]:
    ranks = config.n_gpus_per_node or (1 if config.backend == "local" else 2)
    return (
        f"trainer.backend={config.backend}",
        f"trainer.device={config.device}",
        f"trainer.n_gpus_per_node={ranks}",
        f"trainer.seed={config.seed}",
        f"trainer.default_local_dir={folder}",
        f"trainer.overwrite={str(config.overwrite).lower()}",
    )


def show_answers(console: Console, samples: Path, count: int = 4) -> None:
    """Print a table of `count` validation problems with the first and the last response to each."""
    from rich.table import Table
    from rich.text import Text

    validation = [s for s in read_samples(samples) if s.split == "val"]
    steps = [s.step for s in validation]
    before, after = (
        [s for s in validation if s.step == step][:count] for step in (min(steps), max(steps))
    )
    table = Table(
        title="responses to validation problems, before and after reinforcement learning",
        title_justify="left",
    )
    for column in ("problem", "before", "after", "truth"):
        table.add_column(column)
    for old, new in zip(before, after, strict=True):
        problem = old.prompt.removeprefix("user: ")
        answers = (f"{'✓' if s.reward > 0 else '✗'} {s.response}" for s in (old, new))
        table.add_row(*map(Text, map(shown, (problem, *answers, str(old.ground_truth)))))
    console.print(table)
