"""`trainer.profile`: one trace for each process, and one file of all roles over the step."""

import json
from contextlib import contextmanager
from functools import partial

import pytest
from fine_tuning_cases import six_steps
from run_cases import metrics_of_run, two_steps
from test_restarts import Kills

from quadriga.backends import profiler_options
from quadriga.backends.ray.start import Nsight
from quadriga.cli.main import main
from quadriga.config.loading import load_config
from quadriga.config.schema import ProfileConfig, RunConfig, TrainConfig
from quadriga.errors import CallbackError
from quadriga.observability import profiling
from quadriga.trainer.main import run_training

TRACE = "actor_rollout_rank0.json"


def events(path, kind="X"):
    found = json.loads(path.read_text())["traceEvents"]
    return [event for event in found if event.get("ph") == kind]


def roles_of(path):
    """(track, name) of the spans, and their bounds in seconds."""
    tracks = {event["tid"]: event["args"]["name"] for event in events(path, "M")}
    spans = {}
    for event in events(path):
        span = (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        spans.setdefault((tracks[event["tid"]], event["name"]), []).append(span)
    return spans


@pytest.mark.parametrize("tool", ["torch", "memory"])
def test_the_chosen_steps_are_traced_with_all_roles(run, tmp_path, tool):
    rows = run("trainer.profile.steps=[2]", f"trainer.profile.tool={tool}")
    assert {path.name for path in (tmp_path / "run/profile").iterdir()} == {"step_2", "calls.jsonl"}
    folder = tmp_path / "run/profile/step_2"
    assert sorted(path.name for path in folder.iterdir()) == [TRACE, "roles.json"]
    names = {event["name"] for event in events(folder / TRACE)}
    assert {"aten::mm", "actor_rollout.generate_sequences", "actor_rollout.update_actor"} <= names
    allocated = [e for e in events(folder / TRACE, "i") if e["name"] == "[memory]"]
    assert bool(allocated) == (tool == "memory")
    roles = roles_of(folder / "roles.json")
    (update,) = roles["actor_rollout rank 0", "update_actor"]
    (phase,) = roles["controller", "update_actor"]
    assert phase[0] - 0.5 < update[0] < update[1] < phase[1] + 0.5  # one clock
    assert phase[1] - phase[0] == pytest.approx(rows[-1]["time/update_actor"], abs=1e-3)
    assert not any(name == "stop_profile" for _, name in roles)


def test_the_timeline_of_a_run_has_every_rank_in_every_step(run, tmp_path):
    """One file with the controller, the ranks, the calls, the scoring and the weight syncs."""
    apart = ["placement.actor=[0]", "placement.rollout=[1]", "trainer.n_gpus_per_node=2"]
    run("trainer.profile.tool=calls", "trainer.max_staleness=1", "data.val_files=[]", *apart)
    assert [path.name for path in (tmp_path / "run/profile").iterdir()] == ["calls.jsonl"]
    trace = tmp_path / "all.json"  # two steps are too few for a plan beside it
    assert main(["plan", "--async", str(tmp_path / "run"), "--trace", str(trace)]) == 2
    found = roles_of(trace)
    of_rank, phases = (found[track, "update_actor"] for track in ("actor rank 0", "controller"))
    for (start, end), own in zip(phases, of_rank, strict=True):
        assert start - 0.05 < own[0] < own[1] < end + 0.05 and len(phases) == 2
    assert {("replica 0", "generate"), ("reward", "score"), ("pause", "sync")} < found.keys()


def test_a_step_that_is_lost_leaves_no_profile(tiny_task, tmp_path, monkeypatch):
    kills = Kills(monkeypatch, [("actor_rollout", "before", "update_actor", 1)])
    metrics_of_run([*two_steps(tiny_task, tmp_path), "trainer.profile.steps=[1]"])
    assert not kills.left and profiling._active is None
    names = [event["name"] for event in events(tmp_path / "run/profile/step_1" / TRACE)]
    assert names.count("actor_rollout.update_actor") == 1
    assert names.count("actor_rollout.generate_sequences") == 1


def test_an_error_in_a_step_ends_its_profile(train_overrides):
    class Raises:
        def on_step(self):
            len(5)

    config = load_config(TrainConfig, [*train_overrides, "trainer.profile.steps=[1]"])
    with pytest.raises(CallbackError):
        run_training(config, [Raises()])
    assert profiling._active is None


@pytest.mark.parametrize("command", ["sft", "rm"])
def test_fine_tuning_is_traced(tiny_task, tmp_path, command):
    runs = six_steps(command, tiny_task, tmp_path)
    runs.run("run", "trainer.profile.steps=[1]", "trainer.total_training_steps=1")
    names = {name for _, name in roles_of(tmp_path / "run/profile/step_1/roles.json")}
    assert {"step", f"update_{command}"} <= names


@pytest.mark.nightly
def test_each_rank_of_ray_has_a_trace(train_overrides, tmp_path):
    metrics_of_run(
        [*train_overrides, "trainer.backend=ray", "trainer.num_cpus=2", "placement.actor=[0]",
         "trainer.n_gpus_per_node=2", "placement.rollout=[1]", "trainer.profile.steps=[1]",
         "trainer.total_training_steps=1", "trainer.device=cpu", "trainer.val_before_train=false"]
    )  # fmt: skip
    folder = tmp_path / "run/profile/step_1"
    ranks = {path.name for path in folder.iterdir()} - {"roles.json"}
    assert len(ranks) == 2 and all(name.endswith("_rank0.json") for name in ranks)
    update, generate = (
        {event["name"] for name in ranks if role in name for event in events(folder / name)}
        for role in ("actor", "rollout")
    )
    assert any(name.endswith("update_actor") for name in update - generate)
    assert any(name.endswith("generate_sequences") for name in generate - update)
    assert {"controller", "actor rank 0"} < {track for track, _ in roles_of(folder / "roles.json")}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["trainer.profile.steps=[3]"], "trainer.profile.steps=[3] has step 3, but the run has 2"),
        (["trainer.profile.steps=[1]", "trainer.profile.tool=nsys"], "records CUDA on ranks that"),
    ],
)
def test_a_profile_that_cannot_be_is_refused_before_the_start(refused, settings, told):
    assert told in refused(*settings)


def test_nsys_starts_the_ranks_and_marks_the_calls(tmp_path, monkeypatch):
    trainer = RunConfig(default_local_dir=str(tmp_path), profile=ProfileConfig([5, 6], "nsys"))
    options = profiler_options(trainer)["profiler"].options
    assert options["capture-range"] == "cudaProfilerApi"
    assert options["capture-range-end"] == "repeat:2"
    assert options["o"] == f"{tmp_path}/profile/process_%p"
    assert isinstance(profiler_options(trainer)["profiler"], Nsight)
    assert profiler_options(RunConfig()) == {}
    import torch

    told = []

    @contextmanager
    def marked(name):
        told.append(name)
        yield
        told.append("end")

    for mark in ("start", "stop"):
        monkeypatch.setattr(torch.cuda.profiler, mark, partial(told.append, mark))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("wait"))
    monkeypatch.setattr(torch.cuda.nvtx, "range", marked)
    profiling.start_profile("nsys", tmp_path / "step_5/actor_rank0.json")
    assert profiling.profiled("actor", 0, "update_actor", lambda: 7) == 7
    (call,) = profiling.stop_profile()
    assert call[:3] == ("actor", 0, "update_actor") and profiling.stop_profile() == []
    assert told == ["wait", "start", "actor.update_actor", "end", "wait", "stop"]


def test_a_lost_step_leaves_no_profile_behind(tmp_path):
    profiling.start_profile("torch", tmp_path / "step_1/a.json")
    profiling.start_profile("torch", tmp_path / "step_1/b.json")  # a second group of the process
    profiling.start_profile("torch", tmp_path / "step_1_again/a.json")
    profiling.stop_profile()
    folders = [path.parent.name for path in sorted(tmp_path.rglob("*.json"))]
    assert folders == ["step_1", "step_1_again"]
