"""Settings of small runs, and the metrics of such a run."""

import functools
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.observability.jsonl import read_jsonl

STREAMED = ("trainer.max_staleness=1", "actor_rollout_ref.rollout.slice_tokens=5")


RULE = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Differs from response to response, so that prompt groups have different scores."""
    digits = sum(map(ord, solution_str)) % 7 / 7
    return {"score": digits, "form": digits, "length": float(len(solution_str))}
'''


@dataclass(frozen=True)
class Task:
    """The folder with the data files and the model of `tiny_task`."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "base"

    def data(self, part: str) -> str:
        return f"[{self.folder / 'data' / part}.parquet]"


def two_steps(tiny_task: Task, folder: Path) -> list[str]:
    """The settings of `train_overrides`, with the run folder in `folder`."""
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
        "trainer.check_memory=false",  # the check simulates passes: a third of the time of a run
        f"trainer.default_local_dir={folder / 'run'}",
        "trainer.loggers=[jsonl]",
        "reward.num_processes=0",
    ]


def metrics_of_run(overrides: list[str]) -> list[dict[str, float]]:
    """Train with these settings, and return the metrics of each step."""
    from quadriga.trainer.main import run_training

    config = load_config(TrainConfig, overrides)
    run_training(config)
    return list(read_jsonl(Path(config.trainer.default_local_dir) / "metrics.jsonl"))


def timeless(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the metrics that depend neither on time nor on the way of the weights."""
    clocks = ("time/", "perf/", "progress/", "weight_sync/")
    return [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in rows]


def often(names, *chosen: str):
    """Parameters: every name; those that are not chosen run nightly."""
    return [pytest.param(n, marks=() if n in chosen else pytest.mark.nightly) for n in names]


def noted(monkeypatch, owner, name: str, note) -> None:
    """Call `note` with the arguments of each call of a function or a method, before it."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(*args, **kwargs):
        note(*args, **kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, method)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors in the files of a folder: weights, moments and random states."""
    return {
        f"{file.relative_to(folder)}: {name}": tensor
        for file in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_equal_tensors(ours: Path, theirs: Path) -> None:
    """Check that two folders have the same tensors, bit for bit."""
    first, second = tensors(ours), tensors(theirs)
    assert list(first) == list(second) and len(first) > 5
    assert [key for key in first if not torch.equal(first[key], second[key])] == [], ours.name


def check_equal(run: Path, whole: Path, step: int = 6) -> list[dict[str, float]]:
    """Check that two runs of so many steps have equal rows, samples, states and models. Return what
    the rows of the first one tell of restarts."""
    rows = timeless([*read_jsonl(run / "metrics.jsonl")])
    told = [{k: row.pop(k) for k in list(row) if k.startswith("restarts/")} for row in rows]
    assert rows == timeless([*read_jsonl(whole / "metrics.jsonl")])
    if (whole / "samples.jsonl").exists():
        assert [*read_jsonl(run / "samples.jsonl")] == [*read_jsonl(whole / "samples.jsonl")]
    for name in (f"checkpoints/global_step_{step}", "model"):
        assert_equal_tensors(run / name, whole / name)
    return [one for one in told if one]


def trained(overrides, **arguments) -> list[dict[str, float]]:
    """Train with these settings; return the metrics without those of the role."""
    from quadriga.trainer.ppo import RayPPOTrainer
    from quadriga.trainer.roles.registry import load_train_config

    config = load_train_config(overrides)
    trainer = RayPPOTrainer(config, **arguments)
    with closing(trainer):
        trainer.init_workers()
        trainer.fit()
    return timeless(list(read_jsonl(f"{config.trainer.default_local_dir}/metrics.jsonl")))
