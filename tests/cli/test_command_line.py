"""The command line: parsing, messages and exit codes."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

import quadriga
from quadriga.cli.main import COMMANDS, main, parse
from quadriga.config.convert import settings_of
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import DataError, LengthError, WorkerMethodError

ALL = [command.name for command in COMMANDS]


def run(capsys, *arguments):
    """Return (exit code, standard output, standard error)."""
    code = main(list(arguments))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def replace_training(monkeypatch, action):
    monkeypatch.setitem(sys.modules, "quadriga.trainer.main", SimpleNamespace(run_training=action))


def raising(error):
    def action(config):
        raise error

    return action


def test_the_command_receives_the_settings(capsys, monkeypatch, tmp_path):
    seen = []
    replace_training(monkeypatch, seen.append)
    file = tmp_path / "run.yaml"
    file.write_text("data: {seed: 1}\ntrainer: {seed: 4}\n")
    code, _, err = run(
        capsys, "train", "data.seed=2", "--config", str(file), "algorithm.adv_estimator=grpo"
    )
    assert (code, err) == (0, "")
    assert seen == [
        load_config(TrainConfig, ["data.seed=2", "trainer.seed=4", "algorithm.adv_estimator=grpo"])
    ]


def test_an_unknown_setting_is_one_line_and_code_2(capsys, monkeypatch):
    replace_training(monkeypatch, pytest.fail)
    code, out, err = run(capsys, "train", "algorithm.adv_estimater=gae")
    assert code == 2
    assert out == ""
    assert err == (
        "error: no setting algorithm.adv_estimater; did you mean algorithm.adv_estimator?\n"
    )


def test_an_input_error_of_a_command_is_one_line_and_code_2(capsys, monkeypatch):
    replace_training(monkeypatch, raising(DataError("row 3 of a.parquet:\nno prompt")))
    code, _, err = run(capsys, "train")
    assert (code, err) == (2, "error: row 3 of a.parquet: no prompt\n")


def test_a_failed_run_shows_the_cause_first_and_has_code_1(capsys, monkeypatch):
    error = WorkerMethodError("actor[1].update: boom", remote_traceback="Traceback\n  rank code")
    replace_training(monkeypatch, raising(error))
    code, _, err = run(capsys, "train")
    assert code == 1
    assert err.splitlines()[0] == "error: actor[1].update: boom"
    assert "rank code" in err
    assert len(err.splitlines()) < 25


def test_the_traceback_of_a_worker_is_shown_once(capsys, monkeypatch):
    remote = "Traceback\n  rank code\nValueError: boom"
    error = WorkerMethodError(f"boom in update\n\nTraceback of the worker:\n{remote}",
                              remote_traceback=remote)  # fmt: skip
    replace_training(monkeypatch, raising(error))
    _, _, err = run(capsys, "train")
    assert err.count("rank code") == 1


def test_an_error_on_the_controller_shows_the_traceback(capsys, monkeypatch):
    replace_training(monkeypatch, raising(LengthError("3 rows and 4 rows")))
    code, _, err = run(capsys, "train")
    assert code == 1
    assert err.startswith("error: 3 rows and 4 rows\n")
    assert "test_command_line.py" in err


def test_interrupting_has_code_130(capsys, monkeypatch):
    replace_training(monkeypatch, raising(KeyboardInterrupt()))
    code, _, err = run(capsys, "train")
    how = "the same command continues with trainer.resume_mode=auto"
    assert (code, err) == (130, f"stopped; {how}\n")


def test_other_exceptions_are_raised(monkeypatch):
    replace_training(monkeypatch, raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        main(["train"])


@pytest.mark.parametrize("name", ALL)
def test_help_lists_every_setting_with_its_default(capsys, name):
    with pytest.raises(SystemExit) as left:
        main([*name.split(), "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    command = next(c for c in COMMANDS if c.name == name)
    assert command.summary in text
    if command.settings is not None:
        for setting in settings_of(command.settings()):
            assert f"  {setting.key}={setting.default}  (" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], "no command 'trian'; did you mean train?"),
        (["--version", "xyz"], "no command 'xyz'; choose from train, sft"),
        (["train", "--lr=3"], "unknown option --lr=3; write settings as key=value"),
        ([], "required: command"),
        (["data"], "required: command"),
        (["doctor", "x"], "doctor has no settings, got x"),
    ],
)
def test_invalid_command_lines_have_code_2(capsys, arguments, words):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert words in capsys.readouterr().err


def test_options_and_settings_can_be_mixed():
    read = parse(["generate", "n=2", "--print-config", "prompt=3 + 4"])
    assert read.overrides == ("n=2", "prompt=3 + 4")
    assert read.print_config


def test_config_reads_what_print_config_writes(capsys, tmp_path, monkeypatch):
    replace_training(monkeypatch, pytest.fail)
    code, out, _ = run(capsys, "train", "data.seed=3", "--print-config")
    assert code == 0
    (tmp_path / "c.yaml").write_text(out)
    assert load_config(TrainConfig, file=tmp_path / "c.yaml").data.seed == 3


def test_version(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"quadriga {quadriga.__version__}\n"


def test_a_closed_standard_output_is_not_an_error():
    code = (
        "import os, sys\n"
        "from quadriga.cli.main import main\n"
        "read, write = os.pipe(); os.close(read); os.dup2(write, 1)\n"
        "code = main(['train', '--print-config'])\n"
        "sys.stderr.write(f'code {code}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr == "code 0"
