"""Real runs with `trainer.max_staleness` beside synchronous ones: accuracy and time.

    python benchmarks/stream_runs.py --accuracy FOLDER           # keeps the runs in FOLDER
    python benchmarks/stream_runs.py --accuracy FOLDER --runs 1  # makes the next run alone
    python benchmarks/stream_runs.py --uneven                    # five minutes
    python benchmarks/stream_runs.py --against CHECKOUT          # another version of Quadriga

Prints JSON. `--accuracy` trains the model of `quadriga demo` after its supervised warm start: the
same prompts synchronously and with responses that are 1 and 4 steps old, with and without the
correction of the loss, three seeds each, and validates each model on 2048 problems (greedy
decoding). One generating and one training process on Ray record the order of the calls at each
staleness; the runs themselves repeat it on one process (`trainer.replay_order`), so the ages do not
depend on the machine.

`--uneven`: the same ranks generate and train, responses have up to 256 tokens, and most are short;
in turns, runs without staleness, which wait for the longest response of each step, with staleness
1, which carry the responses that have not ended into the next step, and with staleness 2 and three
times the prompts of a step on their way. A step has 16 rows (4 prompts), with `--rows 128`
16 prompts. On a CPU a decoding step takes longer with more rows, so this gains less than a GPU.

`--against`: runs with `trainer.max_staleness=0` of this checkout and of another one in turns, which
must end with the same model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quadriga.cli.demo import data_command, sft_command, train_command
from quadriga.config.commands import DemoConfig
from quadriga.observability.jsonl import read_jsonl

CHECKOUT = Path(__file__).parents[1]
STOPS = 8  # of the tokens of the tiny model; a response ends with one of them
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(solution_str) % 7 / 7
"""
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

    for seed in SEEDS:
        for staleness in sorted({staleness for staleness, _ in CASES.values()} - {0}):
            yield from train(f"order {staleness}", seed, staleness, "token", *APART)
        for name, (staleness, correction) in CASES.items():
            order = f'trainer.replay_order="{folder}/lr {lr}/order {staleness}, seed {seed}"'
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


def tiny_run(folder: Path, checkout: Path, *settings: str) -> list[dict[str, float]]:
    """Train a model of random weights, whose scores depend on the tokens alone."""
    data = folder / "data/train.parquet"
    if not data.exists():
        demo = DemoConfig(output=str(folder), backend="local")
        quadriga("data", "make", *data_command(demo, folder).overrides, "train_size=512")
        (folder / "reward.py").write_text(REWARD)
    run = folder / f"run{len(list(folder.glob('run*')))}"
    words = [
        f"reward.path={folder}/reward.py", f"actor_rollout_ref.model.path={folder}/base",
        f"data.train_files=[{data}]", "data.train_batch_size=16", "trainer.backend=local",
        "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.optim.lr=1e-6",
        "trainer.test_freq=0", "trainer.val_before_train=false", "trainer.samples_per_step=128",
        "trainer.threads_per_worker=1", "trainer.loggers=[jsonl]", "reward.num_processes=0",
        f"trainer.default_local_dir={run}", *settings,
    ]  # fmt: skip
    command = [sys.executable, "-m", "quadriga.cli.main", "train", *words]
    source = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    subprocess.run(command, check=True, stdout=sys.stderr, env=source)
    return list(read_jsonl(run / "metrics.jsonl"))


def seconds_of(runs: list[list[dict[str, float]]]) -> float:
    """The median step of some runs, without the first three and the last one of each."""
    return float(np.median([row["time/step"] for rows in runs for row in rows[3:-1]]))


def uneven(folder: Path, rows: int) -> dict[str, Any]:
    """Waiting for the longest response against carrying it into the next step."""
    prompts, n = {16: (4, 4), 128: (16, 8)}[rows]
    stops = f"actor_rollout_ref.rollout.sampling.stop_token_ids={list(range(3, 3 + STOPS))}"
    common = [
        "data.max_response_length=256", stops, "trainer.total_training_steps=40",
        f"data.train_batch_size={prompts}", f"actor_rollout_ref.rollout.n={n}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
    ]  # fmt: skip
    slices = "actor_rollout_ref.rollout.slice_tokens=32"
    cases: dict[str, list[str]] = {
        "synchronous": [],
        "staleness 1": ["trainer.max_staleness=1", slices],
        "staleness 2, three times the prompts": [
            "trainer.max_staleness=2", "actor_rollout_ref.rollout.oversample=3", slices
        ],
    }  # fmt: skip
    runs: dict[str, list[list[dict[str, float]]]] = {name: [] for name in cases}
    for _ in range(3):
        for name, more in cases.items():
            runs[name].append(tiny_run(folder, CHECKOUT, *common, *more))
    found: dict[str, Any] = {}
    for name, own in runs.items():
        rows = [row for run in own for row in run]
        found[name] = {"step_s": seconds_of(own), "generation_s": np.median(
            [row["time/rollout"] for row in rows]), "update_s": np.median(
            [row["time/update_actor"] for row in rows]), "mean_tokens": np.mean(
            [row["response_length/mean"] for row in rows]), "longest": np.mean(
            [row["response_length/max"] for row in rows])}  # fmt: skip
    first, *others = cases
    for name in others:
        each = [
            seconds_of([a]) / seconds_of([b]) for a, b in zip(runs[first], runs[name], strict=True)
        ]
        found[name] |= {"speed_up": float(np.median(each)), "each": each, "goal": 1.5}
    return found


def against(folder: Path, other: Path) -> dict[str, Any]:
    """The loop without staleness against that of another checkout."""
    settings = ("data.max_response_length=64", "trainer.total_training_steps=16")
    runs: dict[Path, list[list[dict[str, float]]]] = {CHECKOUT: [], other: []}
    for _ in range(3):
        for checkout, own in runs.items():
            own.append(tiny_run(folder, checkout, *settings))
    models = {(run / "model/model.safetensors").read_bytes() for run in folder.glob("run*")}
    steps = [seconds_of(own) for own in runs.values()]
    each = [[seconds_of([rows]) for rows in own] for own in runs.values()]
    return {"step_s": steps, "each": each, "ratio": steps[0] / steps[1], "models": len(models)}


def main() -> None:
    """Run, and print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--accuracy", type=Path, help="the folder of the runs")
    parser.add_argument("--lr", default="1e-4", help="learning rate; that of the demo is 3e-4")
    parser.add_argument("--runs", type=int, help="make at most so many of them")
    parser.add_argument("--uneven", action="store_true", help="the time of steps")
    parser.add_argument("--rows", type=int, default=16, choices=(16, 128), help="of a step")
    parser.add_argument("--against", type=Path, help="a checkout of another version")
    options = parser.parse_args()
    if options.accuracy is None:
        with tempfile.TemporaryDirectory() as folder:
            task, other = Path(folder), options.against
            report = (
                uneven(task, options.rows) if other is None else against(task, other.absolute())
            )
        print(json.dumps(report, indent=1))
        return
    for number, run in enumerate(accuracy_runs(options.accuracy, options.lr), 1):
        print(f"{time.strftime('%H:%M:%S')} {run}", file=sys.stderr)
        if number == options.runs:
            break
    print(json.dumps(accuracy(options.accuracy / f"lr {options.lr}"), indent=1))


if __name__ == "__main__":
    main()
