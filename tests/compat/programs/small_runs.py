"""Settings of verl for a run of one step, and the data and the model of this run."""

from pathlib import Path

from quadriga.cli.make_data import run_make_data
from quadriga.config.commands import ArithmeticDataConfig
from quadriga.config.loading import load_config


def verl_settings(task: Path, folder: Path) -> dict:
    """Settings of verl for one step on one rank."""
    return {
        "data": {
            "train_files": str(task / "data" / "train.parquet"),
            "train_batch_size": 4,
            "max_response_length": 6,
        },
        "actor_rollout_ref": {
            "model": {"path": str(task / "base")},
            "actor": {"ppo_mini_batch_size": 4, "optim": {"lr": 1e-3}, "use_kl_loss": False},
            "rollout": {"name": "hf", "n": 2, "gpu_memory_utilization": 0.4},
        },
        "algorithm": {"adv_estimator": "grpo"},
        "trainer": {
            "total_training_steps": 1,
            "n_gpus_per_node": 1,
            "device": "cpu",
            "logger": ["file"],
            "default_local_dir": str(folder / "run"),
        },
    }


def make_task(folder: Path) -> None:
    """Write the data and the model under a folder."""
    settings = [
        f"output={folder / 'data'}",
        f"model_output={folder / 'base'}",
        *("train_size=16", "val_size=4", "sft_size=8", "max_number=5"),
        *("hidden_size=32", "num_layers=1", "num_heads=2", "intermediate_size=32"),
    ]
    run_make_data(load_config(ArithmeticDataConfig, settings))
