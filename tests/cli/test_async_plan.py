"""`quadriga plan --async RUN` reads what the work of a run takes, and recommends settings."""

import itertools
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from quadriga.cli.async_plan import division_of, read_run
from quadriga.cli.main import main
from quadriga.config.loading import load_config, to_yaml
from quadriga.config.schema import TrainConfig
from quadriga.errors import DataError
from quadriga.observability.jsonl import read_jsonl, read_metrics, read_samples
from quadriga.streams.simulation import Costs, Simulation
from quadriga.streams.timeline import read_stream, recorded_spans
from quadriga.trainer.roles.registry import load_train_config

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from streams import long_responses

DECODE, ROW, TRAIN = 2e-3, 1e-4, 1e-3


def run_folder(folder, *, steps=8, staleness=0, samples=True, more=()):
    """A run on 4 ranks with 8 prompts × 2 responses, whose work takes known times."""
    settings = [
        f"trainer.max_staleness={staleness}", "trainer.n_gpus_per_node=4", *more,
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
            "step": step, "progress/elapsed": float(step),
            "time/rollout": DECODE * int(lengths.max()) + ROW * tokens / 4,
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


def streamed_folder(folder, staleness, costs, *more):
    """The record of a simulated run, as a streamed run writes it."""
    run_folder(folder, staleness=staleness, more=more)
    config = load_train_config((), folder / "config.yaml")
    lengths = np.random.default_rng(1).lognormal(4, 1, (24 * 8, 2)).astype(int).clip(1, 400)
    run, events = Simulation(division_of(config), costs, lengths, 5), []

    def note(event, numbers, ended, **own):
        own["seconds"] = run.now - next(
            span.start
            for span in run._spans
            if span.track == f"replica {own['replica']}" and span.end == run.now
        )
        events.append({"at": run.now, event: numbers, **own})

    run._generation.note = note
    found = run.run()
    for end, numbers in zip(found.ends, found.numbers, strict=True):
        versions = [[(0, length)] for length in lengths[numbers].ravel().tolist()]
        events += [{"at": end, "take": numbers.tolist()}, {"at": end, "versions": versions}]
    syncs = [span for span in found.spans if span.track == "sync"]
    for span in syncs:
        seconds = span.end - span.start
        events += [{"at": span.end, "resume": ["sync"], "seconds": seconds}]
    events.insert(0, {"at": 0.0, "settings": [8, staleness, 2, 64, 24, 400, 0]})
    events = [{"step": 1, **event} for event in events]
    events.sort(key=lambda event: event["at"])
    waits, trains = ([span for span in found.spans if span.track == track]
                     for track in ("controller", "trainer"))  # fmt: skip
    rows = [
        {
            "step": step,
            "time/rollout": wait.end - wait.start,
            "progress/elapsed": sync.end,
            "time/update_actor": train.end - train.start,
            "time/sync_weights": sync.end - train.end,
            "batch/tokens": int(train.tokens),
            "response_length/mean": train.tokens / 16 - 5,
        }
        for step, (wait, train, sync) in enumerate(zip(waits, trains, syncs, strict=True), 1)
    ]
    for name, own in (("metrics", rows), ("stream", events)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    return found


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize("placed", [(), ("placement.actor=[0,1]", "placement.rollout=[2,3]")])
def test_a_streamed_run_is_measured_by_its_calls(staleness, placed, tmp_path):
    costs = Costs(DECODE, ROW, prefill=1e-4, call=0.02, train=TRAIN, sync=0.01)
    replicas = ["actor_rollout_ref.rollout.replicas.enable=true"] if placed else []
    more = (*placed, *replicas, "actor_rollout_ref.rollout.slice_tokens=64")
    timelines = {k: streamed_folder(tmp_path / f"{k}", k, costs, *more) for k in (1, 2, 4)}
    run = read_run(tmp_path / str(staleness))
    names = ("train", "sync", *(("decode", "decode_row", "prefill", "call") if placed else ()))
    for name in names:  # in turns, four copies share the rows of a call, and the last one ends it
        assert getattr(run.costs, name) == pytest.approx(getattr(costs, name), rel=0.02), name
    assert run.seconds == pytest.approx(timelines[staleness].step_seconds, rel=0.15)
    for k, found in timelines.items():
        config = load_train_config((), tmp_path / f"{k}/config.yaml")
        assert run.simulated(config).step_seconds == pytest.approx(found.step_seconds, rel=0.1)
    spans = recorded_spans(tmp_path / f"{staleness}")
    tokens = sum(span.tokens for span in spans)
    assert tokens == timelines[staleness].tokens.sum(), "each token is of one call"


@pytest.mark.parametrize(
    ("share", "steps"), [pytest.param(0.02, 24, marks=pytest.mark.nightly), (0.05, 12)]
)
def test_the_plan_agrees_with_the_simulation_by_the_share_of_long_responses(share, steps):
    """In turns against apart: from the record of a synchronous run, as with its times known."""
    found = long_responses((share,), steps)[str(share)]
    assert found["by_the_plan"] == pytest.approx(found["apart_over_in_turns"], rel=0.02)


MISSING = object()
WRONG = (MISSING, None, "x", {}, [], [["x"]], [[1, 2, 3]], True, 1e300)


@pytest.mark.parametrize("name", ["stream", "metrics", "samples"])
def test_a_damaged_line_is_named(name, tmp_path):
    """A field of a line is missing or has another type: one line names it, if it is needed."""
    streamed_folder(folder := tmp_path / "run", 1, Costs(DECODE))
    path, named = folder / f"{name}.jsonl", 0
    read = {"stream": read_stream, "metrics": read_metrics, "samples": read_samples}[name]
    rows = list(read_jsonl(path))
    for number in {tuple(row): number for number, row in enumerate(rows)}.values():
        for key, wrong in itertools.product(rows[number], WRONG):
            damaged = {k: wrong if k == key else v for k, v in rows[number].items()}
            lines = [*rows[:number], damaged, *rows[number + 1 :]]
            kept = [{k: v for k, v in line.items() if v is not MISSING} for line in lines]
            path.write_text("".join(json.dumps(line) + "\n" for line in kept))
            try:
                list(read(path))
            except DataError as error:
                named += 1
                assert str(error).startswith(f"{path}:{number + 1}: field ") or key == "take"
                fields = rf"field (event|{key})[\[\]\d]* must be|field versions must have rows of"
                assert re.search(fields, str(error))
    assert named > 20


def test_the_table_and_the_recommended_settings(tmp_path, capsys):
    trace = tmp_path / "trace.json"
    given = ["plan", "--async", str(run_folder(tmp_path / "run")), "--trace", str(trace)]
    assert main(given) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert [e["ph"] for e in events] == ["M"] + 3 * 8 * ["X"]
    update = next(e for e in events if e["name"] == "update_actor")
    assert update.keys() == {"ph", "name", "ts", "dur", "pid", "tid", "args"} and update["dur"] > 0
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
        ({"staleness": 2}, r"has no times of calls in stream\.jsonl"),
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
