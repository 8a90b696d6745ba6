"""`quadriga plan --async RUN` reads what the work of a run takes, and recommends settings."""

from __future__ import annotations

import json

import numpy as np
import pytest

from quadriga.cli.async_plan import read_run
from quadriga.cli.main import main
from quadriga.config.loading import load_config, to_yaml
from quadriga.config.schema import TrainConfig

DECODE, ROW, TRAIN = 2e-3, 1e-4, 1e-3


def run_folder(folder, *, steps=8, staleness=0, samples=True):
    """A run on 4 ranks with 8 prompts × 2 responses, whose work takes known times."""
    settings = [
        f"trainer.max_staleness={staleness}", "trainer.n_gpus_per_node=4",
        "data.train_batch_size=8", "actor_rollout_ref.rollout.n=2",
        "data.max_response_length=400", "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.name=vllm",
    ]  # fmt: skip
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(load_config(TrainConfig, settings)))
    rng = np.random.default_rng(0)
    rows, written = [{"step": 0, "val/score": 0.0}], []
    for step in range(1, steps + 1):
        lengths = rng.lognormal(4, 1, 16).astype(int).clip(1, 400)
        tokens = int(lengths.sum())
        rows.append({
            "step": step, "time/rollout": DECODE * int(lengths.max()) + ROW * tokens / 4,
            "time/update_actor": TRAIN * tokens / 4, "time/sync_weights": 0.01,
            "batch/tokens": tokens, "response_length/mean": tokens / 16,
            "response_length/max": int(lengths.max()),
        })  # fmt: skip
        sample = {"step": step, "split": "train", "prompt": "", "response": "", "reward": 0.0}
        written += [sample | {"response_tokens": int(length)} for length in lengths[:8] if samples]
    for name, found in (("metrics", rows), ("samples", written)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return folder


def test_times_of_the_work_of_a_run(tmp_path):
    run = read_run(run_folder(tmp_path / "run"))
    assert run.costs.decode == pytest.approx(DECODE, rel=0.02)
    assert run.costs.decode_row == pytest.approx(ROW, rel=0.1)
    assert run.costs.train == pytest.approx(TRAIN, rel=0.02)
    assert run.simulated(run.config).step_seconds == pytest.approx(run.seconds, rel=0.1)


def test_the_table_and_the_recommended_settings(tmp_path, capsys):
    assert main(["plan", "--async", str(run_folder(tmp_path / "run"))]) == 0
    out = capsys.readouterr().out
    for words in ("in turns", "longest response", "training", " 1.00 "):
        assert words in out
    line = out.splitlines()[-1].removeprefix("recommended: ")
    load_config(TrainConfig, ["trainer.n_gpus_per_node=4", *line.split()])
    assert "max_staleness=0" not in line


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "is no run folder"),
        ({"steps": 3}, "has 3 training steps with their times, expected 4"),
        ({"staleness": 2}, r"pass a run with trainer\.max_staleness=0, not 2"),
        ({"samples": False}, r"trainer\.samples_per_step above 0"),
    ],
)
def test_runs_that_cannot_be_planned(given, message, tmp_path, capsys):
    path = run_folder(tmp_path / "run", **given) if given else tmp_path
    assert main(["plan", "--async", str(path)]) == 2
    assert capsys.readouterr().err.startswith("error: plan --async: ")
    with pytest.raises(ValueError, match=message):
        read_run(path)


@pytest.mark.parametrize("more", [["data.seed=1"], ["sft"], ["--config", "x.yaml"]])
def test_settings_beside_a_measured_run_are_refused(more, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["plan", *more, "--async", str(tmp_path)])
    assert "takes all settings from this run" in capsys.readouterr().err
