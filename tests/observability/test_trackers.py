"""Trackers receive metrics, their names are checked, and curves are plotted."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from quadriga.errors import ConfigError, InputError, UnknownNameError
from quadriga.observability.run_folder import RunFolder
from quadriga.observability.trackers import (
    TRACKERS,
    RunInfo,
    Trackers,
    plot_learning_curve,
    register_tracker,
)


class Recorder:
    def __init__(self, fails: type[Exception] | None = None) -> None:
        self.rows, self.closed, self.fails = [], 0, fails

    def log(self, step, metrics):
        self.rows.append((step, dict(metrics)))

    def close(self):
        self.closed += 1
        if self.fails is not None:
            raise self.fails("no")


def run_info(path, **more):
    return RunInfo(folder=RunFolder(path), total_steps=3, **more)


def test_jsonl_and_tensorboard_hold_the_same_numbers(tmp_path):
    trackers = Trackers.open(["jsonl", "tensorboard", "jsonl"], run_info(tmp_path))
    trackers.log(1, {"reward/mean": 0.25, "time/step": 2.0})
    trackers.log(2, {"reward/mean": 0.5})
    trackers.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [
        {"step": 1, "reward/mean": 0.25, "time/step": 2.0},
        {"step": 2, "reward/mean": 0.5},
    ]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


class FakeWandb(ModuleType):
    """Records what `WandbTracker` calls. The numbers of calls and their arguments are checked."""

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)
        self.runs, self.Settings = [], lambda **values: values

    def init(self, **options):
        run = SimpleNamespace(options=options, rows=[], ended=False)
        run.log = lambda metrics, step: run.rows.append((step, metrics))
        run.finish = lambda: setattr(run, "ended", True)
        self.runs.append(run)
        return run


def test_wandb_receives_names_and_metrics_and_a_resumed_run_is_continued(tmp_path, monkeypatch):
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    names = {"project_name": "demo", "experiment_name": "first"}
    for first_step in (0, 2, 0):
        trackers = Trackers.open(["wandb"], run_info(tmp_path, first_step=first_step, **names))
        trackers.log(first_step + 1, {"reward/mean": 0.5})
        trackers.close()
    begun, resumed, another = module.runs
    assert resumed.options["id"] == begun.options["id"] != another.options["id"]
    assert (begun.options["project"], begun.options["name"]) == ("demo", "first")
    assert begun.options["dir"] == str(tmp_path) and begun.rows == [(1, {"reward/mean": 0.5})]
    assert resumed.rows == [(3, {"reward/mean": 0.5})] and another.ended


@pytest.mark.parametrize("fails", [OSError, RuntimeError])
def test_every_tracker_is_closed_even_if_one_raises(fails):
    first, second = Recorder(fails), Recorder()
    trackers = Trackers([first, second])
    trackers.log(1, {"a": 1.0})
    with pytest.raises(fails, match="no"):
        trackers.close()
    trackers.close()
    assert (first.closed, second.closed) == (1, 1)
    assert second.rows == [(1, {"a": 1.0})]


@pytest.fixture
def tracker(monkeypatch):
    """Registers a tracker of the user as `mine`, whose methods do what the test says."""
    monkeypatch.setattr("quadriga.observability.trackers.TRACKERS", dict(TRACKERS))
    let_go = threading.Event()

    def register(**does):
        class Mine(Recorder):
            def __init__(self, run):
                super().__init__()
                self.act("start")

            def act(self, method):
                assert threading.current_thread() is not threading.main_thread()
                what = does.get(method)
                if isinstance(what, BaseException):
                    raise what
                if what == "hang":
                    let_go.wait(30)

            def log(self, step, metrics):
                if step == 2:
                    self.act("log")
                seen.append(step)

            def close(self):
                self.act("close")
                seen.append("closed")

        seen = []
        register_tracker("mine", Mine)
        return seen

    yield register
    let_go.set()


@pytest.mark.parametrize(
    ("does", "seen", "told"),
    [
        ({}, [1, 2, 3, "closed"], None),
        ({"start": OSError("no service")}, [], "its start failed: OSError: no service"),
        ({"start": SystemExit(1)}, [], "its start failed: SystemExit: 1"),
        ({"start": "hang"}, [], "its start is not done after 0.2 s"),
        ({"log": OSError("no network")}, [1, "closed"], "row of step 2 failed: OSError: no net"),
        ({"log": SystemExit(0)}, [1, "closed"], "the row of step 2 failed: SystemExit: 0"),
        ({"log": "hang"}, [1], "the row of step 2 is not done after 0.2 s"),
        ({"close": ValueError("no")}, [1, 2, 3], "its end failed: ValueError: no"),
        ({"close": "hang"}, [1, 2, 3], "its end is not done after 0.2 s"),
        ({"log": OSError("a"), "close": OSError("b")}, [1], "the row of step 2 failed: OSError: a"),
    ],
    ids=str,
)
def test_a_run_goes_on_without_a_tracker_that_raises_or_hangs(
    tracker, tmp_path, caplog, does, seen, told
):
    got = tracker(**does)
    trackers = Trackers.open(["mine", "jsonl"], run_info(tmp_path), timeout_s=0.2)
    for step in (1, 2, 3):
        began = time.monotonic()
        trackers.log(step, {"a": 1.0})
        assert time.monotonic() - began < 0.1  # `log` does not wait
        time.sleep(0.02)
    trackers.close()
    trackers.close()
    assert got == seen
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == (told is not None)
    assert all("tracker mine" in text and told in text for text in warnings)


def test_a_tracker_that_falls_behind_is_dropped_and_not_waited_for_again(
    tracker, tmp_path, caplog, monkeypatch
):
    tracker(log="hang")
    trackers = Trackers.open(["mine"], run_info(tmp_path), timeout_s=0.1)
    for step in (1, 2):
        trackers.log(step, {})
    time.sleep(0.2)
    trackers.log(3, {})
    monkeypatch.setattr("quadriga.observability.trackers.wait", lambda *_: pytest.fail("waits"))
    trackers.log(4, {})
    (text,) = caplog.messages
    assert "gets no more metrics: the row of step 2 is not done after 0.1 s" in text


@pytest.mark.parametrize("made", [None, object()])
def test_a_tracker_without_its_methods_is_refused(tmp_path, monkeypatch, made):
    monkeypatch.setitem(TRACKERS, "mine", lambda _: made)
    with pytest.raises(ConfigError, match=r"mine must have methods log.* returned (None|<obj)"):
        Trackers.open(["mine"], run_info(tmp_path))


@pytest.mark.parametrize("error", [ConfigError("no key"), ImportError("no package")])
def test_a_tracker_that_finds_its_settings_or_package_wrong_is_refused(tracker, tmp_path, error):
    tracker(start=error)
    with pytest.raises(type(error), match="no "):
        Trackers.open(["mine"], run_info(tmp_path))


def test_an_unknown_tracker_names_the_nearest_and_none_is_created(tmp_path):
    with pytest.raises(UnknownNameError) as caught:
        Trackers.open(["jsonl", "tensorbord"], run_info(tmp_path))
    assert str(caught.value) == (
        "there is no tracker for trainer.loggers 'tensorbord'; known: console, jsonl, "
        "tensorboard, wandb; did you mean 'tensorboard'?"
    )
    assert list(tmp_path.iterdir()) == []


def test_the_learning_curve_is_written_as_png(tmp_path):
    rows = [{"step": i, "reward/mean": i / 10} for i in range(10)]
    rows[3]["val/accuracy"] = 0.5
    rows[4]["reward/mean"] = "NaN"
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plot_learning_curve(tmp_path / "m.jsonl", tmp_path / "c.png", title="a run")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="cannot write"):
        plot_learning_curve(tmp_path / "m.jsonl", tmp_path / "absent" / "c.png")


@pytest.mark.parametrize(
    ("validations", "label"),
    [
        ([{"val/score": 0.5, "val/accuracy": 0.5}, {"val/score": 1.0, "val/accuracy": 1.0}],
         "validation accuracy"),
        ([{"val/score": 0.0, "val/accuracy": 0.0}, {"val/score": -0.155}], "validation score"),
    ],
)  # fmt: skip
def test_the_curve_of_a_score_that_is_no_accuracy_is_called_a_score(
    tmp_path, monkeypatch, validations, label
):
    import matplotlib.figure

    figures = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda f, *_, **__: figures.append(f))
    rows = [{"step": i, "reward/mean": 0.0, **row} for i, row in enumerate(validations)]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plot_learning_curve(tmp_path / "m.jsonl", tmp_path / "c.png")
    names = [text.get_text() for text in figures[0].axes[0].get_legend().get_texts()]
    assert names == ["training reward", label]
