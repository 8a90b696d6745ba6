"""Real runs with `trainer.max_staleness` beside synchronous ones: accuracy and time.

    python benchmarks/stream_runs.py --accuracy FOLDER           # keeps the runs in FOLDER
    python benchmarks/stream_runs.py --accuracy FOLDER --runs 1  # makes the next run alone

Prints JSON. `--accuracy` trains the model of `quadriga demo` after its supervised warm start: the
same prompts synchronously and with responses that are 1 and 4 steps old, with and without the
correction of the loss, three seeds each, and validates each model on 2048 problems (greedy
decoding). One generating and one training process on Ray record the order of the calls at each
staleness; the runs themselves repeat it on one process (`trainer.replay_order`), so the ages do not
depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quadriga.cli.demo import data_command, sft_command, train_command
from quadriga.config.commands import DemoConfig
from quadriga.observability.jsonl import read_jsonl

STEPS, PROBLEMS, SEEDS = 60, 2048, (0, 1, 2)
CASES = {
    "synchronous": (0, "none"), "staleness 1": (1, "token"), "staleness 4": (4, "token"),
    "staleness 1, no correction": (1, "none"), "staleness 4, no correction": (4, "none"),
}  # fmt: skip
APART = ("trainer.backend=ray", "trainer.n_gpus_per_node=2", "placement.actor=[0]",
         "placement.rollout=[1]", "trainer.num_cpus=2")  # fmt: skip
SHOWN = ("staleness/mean", "mismatch/k3", "mismatch/effective_sample_size",
         "mismatch/is_weight_mean", "actor/pg_clipfrac", "actor/grad_norm")  # fmt: skip


def quadriga(*words: str) -> None:
    """Run a command in a process of its own; what it prints goes to stderr."""
    command = [sys.executable, "-m", "quadriga.cli.main", *words]
    subprocess.run(command, check=True, stdout=sys.stderr)


def accuracy_runs(folder: Path, lr: str) -> Iterator[Path]:
    """Make the runs that the folder does not have, one for each value. A run that has ended has a
    model, and one that was interrupted begins again."""
    demo = DemoConfig(output=str(folder), backend="local")
    if not (folder / "sft/model").exists():
        data, sft = data_command(demo, folder), sft_command(demo, folder)
        quadriga("data", "make", *data.overrides, f"val_size={PROBLEMS}")
        quadriga("sft", *sft.overrides, "trainer.overwrite=true", "trainer.test_freq=0")
        yield folder / "sft"

    def train(name: str, seed: int, staleness: int, correction: str, *more: str) -> Iterator[Path]:
        own = folder / f"lr {lr}" / f"{name}, seed {seed}"
        if not (own / "model").exists():
            quadriga(
                "train", *train_command(demo, folder).overrides, f"trainer.seed={seed}",
                f"trainer.default_local_dir={own}", f"actor_rollout_ref.actor.optim.lr={lr}",
                f"trainer.max_staleness={staleness}",
                f"algorithm.rollout_correction.level={correction}", "trainer.overwrite=true",
                f"trainer.total_training_steps={STEPS}", "trainer.test_freq=0",
                "trainer.val_before_train=false", "trainer.samples_per_step=0",
                "trainer.threads_per_worker=1", "trainer.loggers=[jsonl]", *more,
            )  # fmt: skip
            yield own

    for staleness in (1, 4):
        yield from train(f"order {staleness}", 0, staleness, "token", *APART)
    for seed in SEEDS:
        for name, (staleness, correction) in CASES.items():
            order = f'trainer.replay_order="{folder}/lr {lr}/order {staleness}, seed 0"'
            yield from train(name, seed, staleness, correction, *[order] * (staleness > 0))


def accuracy(folder: Path) -> dict[str, Any]:
    """Compare the runs of a folder that have ended."""
    found: dict[str, Any] = {}
    for name in CASES:
        own = [folder / f"{name}, seed {seed}" for seed in SEEDS]
        runs = [list(read_jsonl(run / "metrics.jsonl")) for run in own if (run / "model").exists()]
        if runs:
            scores = [rows[-1]["val/score"] for rows in runs]
            means = {key: np.mean([[row.get(key, np.nan) for row in rows] for rows in runs])
                     for key in SHOWN if key in runs[0][1]}  # fmt: skip
            found[name] = {"accuracy": scores, "mean": np.mean(scores), **means}
    base = found.get("synchronous")
    for one in found.values():
        if base and len(one["accuracy"]) == len(base["accuracy"]):
            pairs = 100 * (np.array(one["accuracy"]) - np.array(base["accuracy"]))
            one |= {"points_over_synchronous": pairs.tolist(), "mean_points": pairs.mean()}
    return found


def main() -> None:
    """Run, and print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--accuracy", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--lr", default="1e-4", help="learning rate; that of the demo is 3e-4")
    parser.add_argument("--runs", type=int, help="make at most so many of them")
    options = parser.parse_args()
    for number, run in enumerate(accuracy_runs(options.accuracy, options.lr), 1):
        print(f"{time.strftime('%H:%M:%S')} {run}", file=sys.stderr)
        if number == options.runs:
            break
    print(json.dumps(accuracy(options.accuracy / f"lr {options.lr}"), indent=1))


if __name__ == "__main__":
    main()
