"""Trackers receive metrics, their names are checked, and curves are plotted."""

import json
import logging
import sys
import threading
import time
from dataclasses import asdict
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

import pytest

from quadriga.config.secrets import MASK
from quadriga.errors import ConfigError, InputError, UnknownNameError
from quadriga.observability.jsonl import Sample
from quadriga.observability.run_folder import RunFolder
from quadriga.observability.trackers import (
    TRACKERS,
    RunInfo,
    Trackers,
    check_packages,
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


SAMPLE = asdict(
    Sample(2, "val", "user: 1 + 1?", "key hf_abcdefghijklmnopqrstuvwx", 0.5, ground_truth=["2"])
)
ROW = [2, "user: 1 + 1?", f"key {MASK}", 0.5, "['2']", "None"]
COLUMNS = ["step", "prompt", "response", "reward", "ground_truth", "data_source"]


@pytest.fixture
def service(monkeypatch):
    """A stand-in for the package of a service, which records every call."""

    def stand_in(name):
        module = MagicMock(__spec__=ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return stand_in


def track(name, path, first_step=0):
    """A run of one step with the tracker, which is validated."""
    path.mkdir(exist_ok=True)
    names = {"project_name": "demo", "experiment_name": "first", "settings": {"a.b": 3}}
    trackers = Trackers.open([name], run_info(path, first_step=first_step, **names))
    trackers.log_samples(2, [SAMPLE])
    trackers.log(2, {"val-core/x/pass@4": 0.5})
    trackers.close()


@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio"])
def test_a_service_receives_names_settings_metrics_and_samples(tmp_path, service, name):
    module = service(name)
    for first_step in (0, 2, 0):
        track(name, tmp_path, first_step)
    calls = module.init.call_args_list
    begun, resumed, another = [{**call.kwargs, "args": call.args} for call in calls]
    if name == "trackio":
        assert [call["resume"] for call in (begun, resumed, another)] == ["never", "allow", "never"]
        assert begun["args"] == ("demo", "first")
    else:
        assert resumed["id"] == begun["id"] != another["id"] and begun["project"] == "demo"
        assert begun["name"] == "first"
    assert begun["config"] == {"a.b": 3}
    logged, run = module.init.return_value.log.call_args_list[:2], module.init.return_value
    assert logged[0].kwargs == logged[1].kwargs == {"step": 2}
    assert list(logged[0].args[0]) == ["val_samples"]
    assert logged[1].args == ({"val-core/x/pass@4": 0.5},) and run.finish.call_count == 3
    if name == "swanlab":
        text = f"user: 1 + 1?\n\nkey {MASK}\n\nreward 0.5"
        assert module.Text.mock_calls[0].args == (text,)
    else:
        assert module.Table.mock_calls[0].args == (COLUMNS, [ROW])


def test_mlflow_keeps_its_run_and_takes_names_that_it_allows(tmp_path, service):
    module = service("mlflow")
    module.is_tracking_uri_set.return_value = False
    client = module.MlflowClient.return_value
    client.get_experiment_by_name.return_value = None
    client.create_run.return_value.info.run_id = "one"
    for first_step in (0, 2):
        track("mlflow", tmp_path, first_step)
    module.MlflowClient.assert_called_with(f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    assert client.create_run.call_count == 1
    assert client.log_batch.mock_calls[0].kwargs["params"] == [module.entities.Param("a.b", "3")]
    (name, value, _, step) = module.entities.Metric.mock_calls[0].args
    assert (name, value, step) == ("val-core/x/pass_4", 0.5, 2)
    table = dict(zip(COLUMNS, ([value] for value in ROW), strict=True))
    client.log_table.assert_called_with("one", table, "val_samples/step_2.json")
    client.set_terminated.assert_called_with("one")


def test_tensorboard_shows_the_samples_of_a_validation(tmp_path):
    track("tensorboard", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (event,) = events.Tensors("val_samples/text_summary")
    assert event.step == 2 and b"    user: 1 + 1?" in event.tensor_proto.string_val[0]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio", "swanlab"])
def test_a_service_without_its_package_is_refused_with_its_extra(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=rf"pip install 'quadriga\[{name}\]'"):
        check_packages([name])


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
        "there is no tracker for trainer.loggers 'tensorbord'; known: console, jsonl, mlflow, "
        "swanlab, tensorboard, trackio, wandb; did you mean 'tensorboard'?"
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
