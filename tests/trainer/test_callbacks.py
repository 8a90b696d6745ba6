"""Callbacks are told what happens in a run, once per step, and can change its course."""

from functools import partial

import pytest
from fine_tuning_cases import six_steps
from run_cases import check_equal, two_steps
from test_restarts import SIX, Kills

from quadriga import GRPO, InputError
from quadriga.checkpoint.remote import Uploads
from quadriga.cli.main import main
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import CallbackError, StoreError
from quadriga.observability.callbacks import load_callbacks
from quadriga.observability.jsonl import read_jsonl
from quadriga.trainer.fine_tuning import RMTrainer, SFTTrainer
from quadriga.trainer.main import run_training


class Notes:
    """Notes all events; lowers the rate after step 2, logs in each step, stops after `last`."""

    def __init__(self, last=99):
        self.told, self.last = [], last

    def on_start(self, run):
        self.told.append(("start", run.step))
        run.log({"own/start": 1})

    def on_step(self, run, step, metrics, samples):
        self.told.append(("step", step, len(samples)))
        assert metrics["time/step"] > 0 and all(sample["step"] == step for sample in samples)
        run.log({"own/step": step})
        if step == 2:
            run.scale_lr(0.5)
        if step == self.last:
            run.stop()

    def on_validation(self, step, metrics, samples):
        assert metrics and all(name.startswith("val") for name in metrics)
        self.told.append(("validation", step, len(samples)))

    def on_save(self, step, folder):
        assert (folder / "state.json").exists() or list(folder.iterdir())
        self.told.append(("save", step))

    def on_end(self, error):
        self.told.append(("end", type(error).__name__))

    def steps(self, event):
        return [told[1] for told in self.told if told[0] == event]


def rates(folder, name="actor/lr"):
    return [row[name] for row in read_jsonl(folder / "metrics.jsonl") if name in row]


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.nightly)])
def test_a_callback_changes_a_run_which_goes_on_where_it_stopped(tiny_task, tmp_path, backend):
    run = tmp_path / "run"
    config = [*two_steps(tiny_task, tmp_path), "trainer.total_training_steps=5",
              "trainer.save_freq=2", "trainer.test_freq=2", f"trainer.backend={backend}",
              "trainer.num_cpus=2", "trainer.resume_mode=auto", "trainer.device=cpu"]  # fmt: skip
    notes = Notes(last=3)
    run_training(load_config(TrainConfig, config), [notes])
    samples = 8
    assert notes.steps("start") == [0] and notes.told[-1] == ("end", "NoneType")
    assert [t for t in notes.told if t[0] in ("step", "validation")] == [
        ("validation", 0, samples), ("step", 1, samples), ("step", 2, samples),
        ("validation", 2, samples), ("step", 3, samples), ("validation", 3, samples),
    ]  # fmt: skip
    assert notes.steps("save") == [2, 3] and (run / "model").is_dir()
    assert rates(run) == [1e-3, 1e-3, 5e-4]
    rows = list(read_jsonl(run / "metrics.jsonl"))
    assert [row.get("own/step") for row in rows] == [None, 1, 2, 3] and rows[0]["own/start"] == 1
    again = Notes()
    run_training(load_config(TrainConfig, config), [again])
    assert again.steps("start") == [3] and again.steps("step") == [4, 5]
    assert rates(run) == [1e-3, 1e-3, 5e-4, 5e-4, 5e-4]


@pytest.mark.parametrize("command", ["sft", "rm"])
def test_fine_tuning_tells_its_callbacks(tiny_task, tmp_path, command):
    runs = six_steps(command, tiny_task, tmp_path)
    trainer, notes = {"sft": SFTTrainer, "rm": RMTrainer}[command], Notes(last=5)
    kind = trainer.__init__.__annotations__["config"]
    config = load_config(vars(__import__("quadriga.config.commands", fromlist=[kind]))[kind],
                         runs.given("run", "trainer.test_freq=2"))  # fmt: skip
    done = trainer(config, [notes]).run()
    assert done.steps == 5 and notes.steps("step") == [1, 2, 3, 4, 5]
    assert notes.steps("validation") == [2, 4, 5] and notes.steps("save") == [5]
    found = rates(tmp_path / "run", f"{command}/lr")
    assert [rate / found[0] for rate in found] == [1, 1, 0.5, 0.5, 0.5]


def test_steps_that_are_done_again_are_told_once_and_equal_those_of_an_undisturbed_run(
    tiny_task, rule, tmp_path, monkeypatch
):
    told = []
    for name in ("whole", "kills"):
        (tmp_path / name).mkdir()
        notes = Notes()
        if name == "kills":
            kills = Kills(monkeypatch, [("actor", "before", "update_actor", 2),
                                        ("actor", "before", "update_actor", 5),
                                        ("actor", "before", "update_actor", 8)])  # fmt: skip
        more = ("trainer.async_save=false", "trainer.save_freq=3", rule)
        config = load_config(TrainConfig, [*two_steps(tiny_task, tmp_path / name), *SIX, *more])
        run_training(config, [notes])
        told.append(notes.told)
    assert not kills.left
    assert told[0] == told[1] and len({*told[0]}) == len(told[0])
    assert sum(one["restarts/lost_steps"] for one in check_equal(
        tmp_path / "kills/run", tmp_path / "whole/run")) > 1  # fmt: skip


FILE = """
from pathlib import Path
def on_{0}({1}):
    {2}
"""


@pytest.mark.parametrize(
    ("event", "arguments", "step", "saved"),
    [("start", "run", 0, []), ("step", "step", 1, [1]), ("validation", "metrics", 0, []),
     ("save", "folder", 1, [1, 2]), ("end", "error", 2, [1, 2])],
)  # fmt: skip
def test_an_error_in_a_callback_is_named_and_the_last_step_saved(
    train_overrides, tmp_path, capsys, event, arguments, step, saved
):
    file = tmp_path / "mine.py"
    file.write_text(FILE.format(event, arguments, "len(5)"))
    given = [*train_overrides, f"trainer.callbacks=[{file}]", "trainer.save_freq=1"]
    assert main(["train", *given]) == 1
    output = capsys.readouterr().err
    assert f"train runs the code of {file}" in output
    assert f"error: callback {file}: on_{event} at step {step}: TypeError: object" in output
    assert "len(5)" in output  # the line of the callback
    found = sorted((tmp_path / "run/checkpoints").glob("global_step_*"))
    assert [int(path.name[-1]) for path in found] == saved


class Ends:
    def __init__(self, action):
        self.action, self.told = action, []

    def on_end(self, error):
        self.told.append(error)
        self.action()


@pytest.mark.parametrize("fails", ["upload", "callback"])
def test_all_callbacks_are_told_what_has_failed_at_the_end(train_overrides, monkeypatch, fails):
    def close(uploads, finished):
        raise StoreError("the server is gone")

    if fails == "upload":
        monkeypatch.setattr(Uploads, "close", close)
    callbacks = [Ends(partial(len, 5)), Ends(list)]
    kind = {"upload": StoreError, "callback": CallbackError}[fails]
    with pytest.raises(kind) as caught:
        run_training(load_config(TrainConfig, train_overrides), callbacks)
    first, second = (callback.told for callback in callbacks)
    assert second == [caught.value]
    assert first == [caught.value if fails == "upload" else None]


class Misspelt:
    def on_setp(self): ...


class WrongParameter:
    def on_step(self, loss): ...


class Needs:
    def __init__(self, name): ...


class Coroutine:
    async def on_step(self, step): ...


def test_callbacks_that_cannot_be_called_are_refused_before_anything_starts(tiny_task, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("class Mine:\n    def on_step(self, step): ...\n")
    for given, message in (
        (Misspelt, r"Misspelt: no event on_setp; did you mean on_step\?"),
        (WrongParameter(), r"on_step is given run, step, metrics, samples: .*'loss'"),
        (Coroutine, "Coroutine: on_step must be a function without async"),
        (Needs, "Needs cannot be made without arguments: .*; pass an object"),
        (5, "callback int has none of on_start, "),
        (str(file), r"none of .*; for a class in it, write .*mine\.py:Mine"),
        (f"{file}:Min", "Min has none of on_start"),
        ("absent.py", r"callback file absent\.py does not exist"),
    ):
        with pytest.raises(InputError, match=message):
            GRPO(str(tiny_task.model), len, ["a"], callbacks=[given])
    for given in (Misspelt, Misspelt(), str(file)):
        with pytest.raises(InputError, match="callbacks: expected a list, got "):
            GRPO(str(tiny_task.model), len, ["a"], callbacks=given)
    [(name, _)] = load_callbacks([f"{file}:Mine"])
    assert name == f"{file}:Mine"


class Late:
    """Uses the run where it cannot be changed, or with values that do not fit."""

    def __init__(self, call):
        self.call = call

    def on_start(self, run):
        self.run = run
        run.log({"own": 1})

    def on_step(self, run):
        if self.call != "late":
            eval(f"run.{self.call}")

    def on_save(self):
        self.run.stop()


@pytest.mark.parametrize(
    ("call", "message"),
    [("late", "on_save at step 2: RuntimeError: the run can be changed in on_start, on_step, on_v"),
     ("log({'reward/mean': 1})", r"the row of the step has reward/mean already"),
     ("log({'own/x': 1, 'val/score': 1})", "val/score is a metric of the run; choose another name"),
     ("log({'a': 1}) or run.log({'a': 2})", "the row of the step has a already"),
     ("log({'a': 'b'})", "could not convert string to float"),
     ("scale_lr(0.5, 'critic')", r"no role 'critic' is trained; there are actor"),
     ("scale_lr(-1)", "expected a factor from 0, got -1")],
)  # fmt: skip
def test_changes_that_do_not_fit_are_errors_of_the_callback(train_overrides, call, message):
    with pytest.raises(CallbackError, match=message) as caught:
        run_training(load_config(TrainConfig, train_overrides), [Late(call)])
    assert caught.value.callback == "Late" and caught.value.event in ("on_step", "on_save")
