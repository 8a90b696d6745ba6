"""Measure what checkpoints and snapshots cost the steps of a run on Ray.

    python benchmarks/saving.py --out result.json
    python benchmarks/saving.py --quick

`quadriga sft` trains a Llama on one rank. In one run every second step saves a checkpoint, by turns
in the step and beside the next steps. In two more runs a step takes a snapshot, or does not.
Seconds are medians over steps; the first two steps are left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
from pathlib import Path

from quadriga.checkpoint.writer import CheckpointWriter
from quadriga.cli.make_data import run_make_data
from quadriga.config.commands import ArithmeticDataConfig, SFTConfig
from quadriga.config.loading import load_config
from quadriga.observability.jsonl import read_jsonl
from quadriga.trainer.fine_tuning import run_sft

WARM_UP = 2
GOALS = {"blocked_share": 0.5, "snapshot_share": 0.03}
"""Seconds that a step waits for a save that goes on beside the next steps, over a save within the
step; what snapshots add to a step, one every `every` steps."""


def settings(folder: Path, quick: bool) -> list[str]:
    """Make data and a model, and return the settings of a run."""
    shape = (64, 2, 2, 128) if quick else (512, 8, 8, 1536)
    names = ("hidden_size", "num_layers", "num_heads", "intermediate_size")
    sizes = [f"{name}={size}" for name, size in zip(names, shape, strict=True)]
    data, model = folder / "data", folder / "model"
    made = [f"output={data}", f"model_output={model}", "sft_size=4096", *sizes]
    run_make_data(load_config(ArithmeticDataConfig, made))
    return [
        f"data.train_files=[{data / 'sft.parquet'}]", f"model.path={model}",
        f"data.train_batch_size={16 if quick else 8}", "trainer.loggers=[jsonl]",
        f"trainer.total_training_steps={8 if quick else 13}", "trainer.max_ckpt_to_keep=1",
        "trainer.save_interval_s=null", "trainer.check_memory=false", "trainer.num_cpus=2",
    ]  # fmt: skip


def rows_of(overrides: list[str], folder: Path, *more: str) -> list[dict[str, float]]:
    """Train, and return the metrics of the steps, with the seconds from step to step."""
    run_sft(load_config(SFTConfig, [*overrides, f"trainer.default_local_dir={folder}", *more]))
    rows = list(read_jsonl(folder / "metrics.jsonl"))
    for before, row in itertools.pairwise(rows):
        row["seconds"] = row["progress/elapsed"] - before["progress/elapsed"]
    return rows[WARM_UP:-1]  # the last step saves in any case


def median(rows: list[dict[str, float]], name: str) -> float:
    return statistics.median(row[name] for row in rows if name in row)


def measure(overrides: list[str], folder: Path, every: int) -> dict[str, object]:
    save = CheckpointWriter.save

    def by_turns(self, path, state, ends, *more, **named):
        save(self, path, state, ends or state.step % 4 == 0, *more, **named)

    CheckpointWriter.save = by_turns
    saving = rows_of(overrides, folder / "saving", "trainer.save_freq=2")
    CheckpointWriter.save = save
    blocked = {
        way: [r for r in saving if r["step"] % 4 == at] for way, at in (("in", 0), ("beside", 2))
    }
    plain = rows_of(overrides, folder / "plain")
    kept = rows_of(overrides, folder / "kept", "trainer.snapshot_freq=1")
    files = (folder / "plain/checkpoints").rglob("*.safetensors")
    step, with_snapshot = (median(rows, "seconds") for rows in (plain, kept))
    return {
        "state_mb": round(sum(file.stat().st_size for file in files) / 1e6, 1),
        "step_s": step,
        "blocked_in_step_s": median(blocked["in"], "time/save"),
        "blocked_beside_s": median(blocked["beside"], "time/save"),
        "written_beside_s": median(saving, "time/written"),
        "snapshot_blocked_s": median(kept, "time/snapshot"),
        "snapshot_each_step_share": with_snapshot / step - 1,
        "snapshot_share": (with_snapshot / step - 1) / every,
        "every": every,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--every", type=int, default=10, help="steps between snapshots")
    parser.add_argument("--quick", action="store_true", help="a small model, few steps")
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = measure(settings(folder, options.quick), folder, options.every)
    found["blocked_share"] = found["blocked_beside_s"] / found["blocked_in_step_s"]
    goals = {
        name: {"value": found[name], "goal": goal, "met": found[name] <= goal}
        for name, goal in GOALS.items()
    }
    text = json.dumps({"cpus": os.cpu_count(), **found, "goals": goals}, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
