"""`quadriga demo`: the whole way, small enough for a laptop.

    problems ─► tiny model ─► SFT warm start ─► reinforcement ─► a model that answers

Each stage is an ordinary command with ordinary settings; they are printed, so that any stage can
be run again by hand and changed.
"""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quadriga.config.loading import load_config
from quadriga.config.schema import ArithmeticDataConfig, DemoConfig, SFTConfig, TrainConfig
from quadriga.observability.samples import Sample, read_samples
from quadriga.trainer.main import run_training
from quadriga.trainer.make_data import run_make_data
from quadriga.trainer.sft import SFTResult, run_sft


@dataclass(frozen=True)
class Stage:
    """One command of the demo: `quadriga <command> <overrides>`."""

    command: str
    overrides: tuple[str, ...]

    def __str__(self) -> str:
        return f"quadriga {self.command} {shlex.join(self.overrides)}"


def run_demo(config: DemoConfig) -> None:
    """Run every stage, then show answers before and after.

    Raises:
        InputError: a folder or setting that does not fit; nothing was started.
    """
    from rich.console import Console

    console = Console(highlight=False)
    began = time.perf_counter()
    folder = Path(config.output)
    data, sft, train = (plan(config, folder) for plan in (data_stage, sft_stage, train_stage))

    _announce(console, "1/3  problems, and a model that knows nothing", data)
    run_make_data(load_config(ArithmeticDataConfig, data.overrides))
    _announce(console, "2/3  warm start: imitating worked examples by hasty teachers", sft)
    warm = run_sft(load_config(SFTConfig, sft.overrides))
    _announce(console, "3/3  reinforcement: nothing but right and wrong", train)
    run_training(load_config(TrainConfig, train.overrides))

    show_answers(console, folder / "train" / "samples.jsonl")
    _farewell(console, folder, warm, time.perf_counter() - began)


def data_stage(config: DemoConfig, folder: Path) -> Stage:
    """Problems of one to three steps and a fresh model of a million parameters.

    Most worked examples come from hasty teachers, who take the first step's result for the answer:
    imitation learns to reckon from them, and nothing but the reward can teach more care.
    """
    return Stage(
        "data make",
        (
            f"output={folder / 'data'}",
            f"model_output={folder / 'base'}",
            "max_number=9",
            "max_total=9",
            "max_steps=3",
            "sft_size=4096",
            "sft_careful=0.2",
            "hidden_size=192",
            "num_layers=2",
            "num_heads=6",
            "num_kv_heads=3",
            "intermediate_size=512",
            f"seed={config.seed}",
        ),
    )


def sft_stage(config: DemoConfig, folder: Path) -> Stage:
    """A warm start by imitation."""
    return Stage(
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


def train_stage(config: DemoConfig, folder: Path) -> Stage:
    """Group-relative policy optimisation, or PPO with a critic (`adv_estimator=gae`)."""
    with_critic = config.adv_estimator == "gae"
    return Stage(
        "train",
        (
            f"algorithm.adv_estimator={config.adv_estimator}",
            f"actor_rollout_ref.model.path={folder / 'sft' / 'model'}",
            f"data.train_files=[{folder / 'data' / 'train.parquet'}]",
            f"data.val_files=[{folder / 'data' / 'test.parquet'}]",
            "data.train_batch_size=32",
            "data.max_response_length=26",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            *_optimizer("actor_rollout_ref.actor.optim", "3e-4", warmup=5),
            "actor_rollout_ref.actor.policy_loss.clip_ratio_high=0.28",
            *(CRITIC if with_critic else GROUPS),
            "trainer.total_training_steps=90",
            "trainer.test_freq=10",
            *_shared(config, folder / "train"),
        ),
    )


GROUPS = ("algorithm.filter_groups.enable=true",)
CRITIC = ("critic.optim.lr=5e-4", "algorithm.lam=0.95")


def _optimizer(prefix: str, lr: str, warmup: int) -> tuple[str, ...]:
    return (
        f"{prefix}.lr={lr}",
        f"{prefix}.lr_scheduler=linear",
        f"{prefix}.lr_warmup_steps={warmup}",
        f"{prefix}.min_lr_ratio=0.1",
    )


def _shared(config: DemoConfig, folder: Path) -> tuple[str, ...]:
    return (
        f"trainer.backend={config.backend}",
        f"trainer.device={config.device}",
        f"trainer.n_gpus_per_node={config.n_gpus_per_node}",
        f"trainer.seed={config.seed}",
        f"trainer.default_local_dir={folder}",
        f"trainer.overwrite={str(config.overwrite).lower()}",
    )


def show_answers(console: Any, samples: Path, count: int = 4) -> None:
    """The same held-out problems before and after, side by side."""
    from rich.table import Table
    from rich.text import Text

    held_out = [s for s in read_samples(samples) if s.split == "val"]
    first = min(s.step for s in held_out)
    last = max(s.step for s in held_out)
    table = Table(title="held-out answers before and after reinforcement", title_justify="left")
    for column in ("problem", "before", "after", "truth"):
        table.add_column(column)
    before = [s for s in held_out if s.step == first][:count]
    after = [s for s in held_out if s.step == last][:count]
    for old, new in zip(before, after, strict=True):
        problem = old.prompt.removeprefix("user: ")
        cells = (problem, _marked(old), _marked(new), str(old.ground_truth))
        table.add_row(*map(Text, cells))
    console.print(table)


def _marked(sample: Sample) -> str:
    return f"{'✓' if sample.reward > 0 else '✗'} {sample.response}"


def _announce(console: Any, title: str, stage: Stage) -> None:
    console.print(f"\n{title}", style="bold")
    console.print(f"$ {stage}", style="dim", markup=False, soft_wrap=True)


def _farewell(console: Any, folder: Path, warm: SFTResult, seconds: float) -> None:
    accuracy = "" if warm.accuracy is None else f", from {warm.accuracy:.0%} after the warm start"
    console.print(f"whole demo: {seconds:.0f}s{accuracy}")
    question = "Tom has 3 apples. He buys 4 more. How many apples does Tom have now?"
    console.print("ask it something:")
    console.print(
        f'  quadriga generate model.path={folder / "train" / "model"} prompt="{question}"',
        soft_wrap=True,
    )
