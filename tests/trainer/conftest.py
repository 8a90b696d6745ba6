"""A tiny task and a tiny model, for complete runs of a few steps."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from quadriga.config.loading import load_config
from quadriga.config.schema import ArithmeticDataConfig, TrainConfig

os.environ.setdefault("OMP_NUM_THREADS", "1")


@dataclass(frozen=True)
class Task:
    """The folder with the data files and the model of `tiny_task`."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "base"

    def data(self, part: str) -> str:
        return f"[{self.folder / 'data' / part}.parquet]"


@pytest.fixture(scope="session")
def tiny_task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    from quadriga.trainer.make_data import run_make_data

    folder = tmp_path_factory.mktemp("task")
    run_make_data(
        load_config(
            ArithmeticDataConfig,
            [
                f"output={folder / 'data'}",
                f"model_output={folder / 'base'}",
                "train_size=64",
                "val_size=16",
                "sft_size=64",
                "max_number=5",
                "hidden_size=32",
                "num_layers=2",
                "num_heads=2",
                "intermediate_size=64",
            ],
        )
    )
    return Task(folder)


@pytest.fixture
def train_overrides(tiny_task: Task, tmp_path: Path) -> list[str]:
    """Settings of two steps of eight prompts with two responses each, on the local backend."""
    return [
        f"actor_rollout_ref.model.path={tiny_task.model}",
        f"data.train_files={tiny_task.data('train')}",
        f"data.val_files={tiny_task.data('test')}",
        "data.train_batch_size=8",
        "data.max_response_length=12",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "algorithm.adv_estimator=grpo",
        "trainer.total_training_steps=2",
        "trainer.test_freq=0",
        "trainer.backend=local",
        "trainer.threads_per_worker=1",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "trainer.loggers=[jsonl]",
    ]


@pytest.fixture
def run(train_overrides: list[str]):
    """run("a=b", …) trains with these settings and returns the metrics of each step."""
    from quadriga.observability.jsonl import read_jsonl
    from quadriga.trainer.main import run_training

    def _run(*more: str) -> list[dict[str, float]]:
        config = load_config(TrainConfig, [*train_overrides, *more])
        run_training(config)
        return list(read_jsonl(Path(config.trainer.default_local_dir) / "metrics.jsonl"))

    return _run
