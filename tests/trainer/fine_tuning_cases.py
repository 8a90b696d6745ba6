"""Settings of small runs of `quadriga sft` and `quadriga rm`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from run_cases import Task, timeless

from quadriga.config.commands import RMConfig, SFTConfig
from quadriga.config.loading import load_config
from quadriga.observability.jsonl import read_jsonl
from quadriga.trainer.fine_tuning import run_rm, run_sft


@dataclass(frozen=True)
class Runs:
    """Runs of one command in folders below `folder`."""

    command: str
    folder: Path
    settings: list[str]

    def given(self, name: str, *more: str) -> list[str]:
        return [*self.settings, f"trainer.default_local_dir={self.folder / name}", *more]

    def run(self, name: str, *more: str):
        if self.command == "rm":
            return run_rm(load_config(RMConfig, self.given(name, *more)))
        return run_sft(load_config(SFTConfig, self.given(name, *more)))

    def metrics(self, name: str) -> list[dict[str, float]]:
        return timeless(list(read_jsonl(self.folder / name / "metrics.jsonl")))

    def checkpoint(self, name: str, step: int) -> Path:
        return self.folder / name / "checkpoints" / f"global_step_{step}"


def pair_rows(count: int) -> list[dict[str, Any]]:
    """Pairs: the chosen answer is right. Half of them are texts, half are messages."""
    rows = []
    for number in range(count):
        prompt = [{"role": "user", "content": f"{number % 5} + {number % 3}"}]
        row = {"prompt": prompt, "margin": 0.5}
        for wrong, key in enumerate(("chosen", "rejected")):
            answer = f"#### {number % 5 + number % 3 + wrong}"
            message = {"role": "assistant", "content": answer}
            row[key] = answer if number % 2 else [*prompt, message]
        rows.append(row)
    return rows


def pairs(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in pair_rows(count)))
    return path


def six_steps(command: str, task: Task, folder: Path) -> Runs:
    """Runs of six steps, five batches in an epoch."""
    if command == "rm":
        data = [
            f"data.train_files={pairs(folder / 'train.jsonl', 20)}",
            f"data.val_files={pairs(folder / 'val.jsonl', 6)}",
            "data.train_batch_size=4",
        ]
    else:
        data = [
            f"data.train_files={task.data('sft')}",
            f"data.val_files={task.data('test')}",
            "data.train_batch_size=12",
            "trainer.max_response_length=6",
            "reward.num_processes=0",
        ]
    settings = [
        *data,
        f"model.path={task.model}",
        "optim.lr=3e-3",
        "trainer.total_training_steps=6",
        "trainer.backend=local",
        "trainer.threads_per_worker=1",
        "trainer.loggers=[jsonl]",
    ]
    return Runs(command, folder, settings)
