"""GRPO with a reward model (grader.py) that has a rank of its own.

The task and both models are made here. The reward model is the tiny policy with a new head of one
label.

Run: python examples/trainer/reward_model.py [ray]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

from quadriga import load_config
from quadriga.cli.make_data import run_make_data
from quadriga.config.commands import ArithmeticDataConfig
from quadriga.observability.jsonl import read_jsonl
from quadriga.observability.quiet import silence_libraries
from quadriga.trainer.main import run_training
from quadriga.trainer.roles.registry import load_train_config


def make_task(folder: Path) -> None:
    """Write prompts, a policy and a reward model."""
    small = ["hidden_size=32", "num_layers=2", "num_heads=2", "intermediate_size=64"]
    rows = ["train_size=64", "val_size=16", "sft_size=16", "max_number=5"]
    outputs = [f"output={folder}/data", f"model_output={folder}/policy"]
    run_make_data(load_config(ArithmeticDataConfig, [*outputs, *rows, *small]))
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "policy", num_labels=1)
    model.save_pretrained(folder / "reward_model")


def main(backend: str = "local", *overrides: str) -> list[dict[str, float]]:
    """Train for two steps. Return the metrics of each step."""
    silence_libraries()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_task(folder)
        config = load_train_config(
            [
                f"algorithm.user_files=[{Path(__file__).with_name('grader.py')}]",
                f"grader.model_path={folder}/reward_model",
                "grader.scale=0.5",
                "placement.actor=[0]",
                "placement.grader=[1]",
                "trainer.n_gpus_per_node=2",
                f"actor_rollout_ref.model.path={folder}/policy",
                f"data.train_files=[{folder / 'data' / 'train.parquet'}]",
                f"data.val_files=[{folder / 'data' / 'test.parquet'}]",
                "data.train_batch_size=8",
                "data.max_response_length=12",
                "actor_rollout_ref.rollout.n=2",
                "algorithm.adv_estimator=grpo",
                "trainer.total_training_steps=2",
                "trainer.threads_per_worker=1",
                "trainer.device=cpu",
                "trainer.num_cpus=2",
                "trainer.loggers=[jsonl]",
                f"trainer.default_local_dir={folder}/run",
                f"trainer.backend={backend}",
                *overrides,
            ]
        )
        run_training(config)
        steps = list(read_jsonl(folder / "run" / "metrics.jsonl"))
    for step in steps:
        shown = {key: round(step[key], 4) for key in sorted(step) if "grader" in key}
        print(f"step {step['step']}", shown)
    return steps


if __name__ == "__main__":
    main(*sys.argv[1:])
