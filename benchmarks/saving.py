"""Measure what checkpoints and snapshots cost the steps of a run on Ray.

    python benchmarks/saving.py --out result.json
    python benchmarks/saving.py --width 1024 --rows 64
    python benchmarks/saving.py --quick

`quadriga sft` trains a Llama on one rank. In one run every second step saves a checkpoint, by turns
in the step and beside the next steps. In another one every second step takes a snapshot. What a
snapshot costs is the median difference, between neighbouring steps with and without one, of wall
time and of the CPU time of all processes of the run. The first steps are left out.
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

WARM_UP = 4  # a keeper writes into new memory twice
GOALS = {"blocked_share": 0.5, "snapshot_share": 0.03}
"""Seconds that a step waits for a save that goes on beside the next steps, over a save within the
step; wall time that snapshots add to a step, one every `every` steps."""
CLOCKS = """
import json, time
import psutil

def on_step(run, step):
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:2])
        except psutil.Error:  # it has ended
            pass
    with open(FILE, "a") as file:
        file.write(json.dumps({"step": step, "wall": time.monotonic(), "cpu": total}) + "\\n")
"""
"""A callback that writes the clocks after each step, before its snapshot is taken."""


def settings(folder: Path, quick: bool, width: int, rows: int, steps: int) -> list[str]:
    """Make data and a model, and return the settings of a run."""
    shape = (64, 2, 2, 128) if quick else (width, 8, 8, 3 * width)
    names = ("hidden_size", "num_layers", "num_heads", "intermediate_size")
    sizes = [f"{name}={size}" for name, size in zip(names, shape, strict=True)]
    data, model = folder / "data", folder / "model"
    made = [f"output={data}", f"model_output={model}", "sft_size=4096", *sizes]
    run_make_data(load_config(ArithmeticDataConfig, made))
    return [
        f"data.train_files=[{data / 'sft.parquet'}]", f"model.path={model}",
        f"data.train_batch_size={16 if quick else rows}", "trainer.loggers=[jsonl]",
        f"trainer.total_training_steps={steps}", "trainer.max_ckpt_to_keep=1",
        "trainer.save_interval_s=null", "trainer.check_memory=false", "trainer.num_cpus=2",
    ]  # fmt: skip


def rows_of(overrides: list[str], folder: Path, *more: str) -> list[dict[str, float]]:
    """Train, and return the metrics of the steps."""
    run_sft(load_config(SFTConfig, [*overrides, f"trainer.default_local_dir={folder}", *more]))
    return list(read_jsonl(folder / "metrics.jsonl"))[WARM_UP:-1]  # the last step saves anyway


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
    clocks = folder / "clocks.py"
    clocks.write_text(CLOCKS.replace("FILE", repr(str(folder / "clocks.jsonl"))))
    more = ("trainer.snapshot_freq=2", f"trainer.callbacks=[{clocks}]")
    kept = rows_of(overrides, folder / "kept", *more)
    files = (folder / "kept/checkpoints").rglob("*.safetensors")
    found: dict[str, object] = {
        "state_mb": round(sum(file.stat().st_size for file in files) / 1e6, 1),
        "blocked_in_step_s": median(blocked["in"], "time/save"),
        "blocked_beside_s": median(blocked["beside"], "time/save"),
        "written_beside_s": median(saving, "time/written"),
        "snapshot_blocked_s": median(kept, "time/snapshot"),
        "every": every,
    }
    ticks = list(read_jsonl(folder / "clocks.jsonl"))[WARM_UP - 1 : -1]
    for clock in ("wall", "cpu"):
        # From an even step, whose snapshot is sent beside the odd one, to the odd one; the rest.
        taken = [(b["step"] % 2, b[clock] - a[clock]) for a, b in itertools.pairwise(ticks)]
        pairs = [(w, o) for (odd, w), (_, o) in itertools.pairwise(taken) if odd]
        added = statistics.median(w - o for w, o in pairs)
        plain = statistics.median(o for _, o in pairs)
        found |= {f"step_{clock}_s": plain, f"snapshot_{clock}_s": added}
        found |= {f"snapshot_{clock}_of_steps": added / plain / every}
    return found | {"snapshot_share": found["snapshot_wall_of_steps"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--every", type=int, default=10, help="steps between snapshots")
    parser.add_argument("--width", type=int, default=512, help="hidden size of the model")
    parser.add_argument("--rows", type=int, default=8, help="rows of a step")
    parser.add_argument("--steps", type=int, default=25, help="steps of each run")
    parser.add_argument("--quick", action="store_true", help="a small model, few steps")
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = (options.quick, options.width, options.rows, options.steps)
        found = measure(settings(folder, *shape), folder, options.every)
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
