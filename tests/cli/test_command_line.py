"""The command line: parsing, messages and exit codes."""

import subprocess
import sys

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


def raising(error):
    def action(config):
        raise error

    return action


def test_the_command_receives_the_settings(capsys, replace_training, tmp_path):
    seen = []
    replace_training(seen.append)
    file = tmp_path / "run.yaml"
    file.write_text("data: {seed: 1}\ntrainer: {seed: 4}\n")
    given = ["data.seed=2", "algorithm.adv_estimator=grpo"]
    code, _, err = run(capsys, "train", *given, "--config", str(file))
    assert (code, err) == (0, "")
    assert seen == [load_config(TrainConfig, [*given, "trainer.seed=4"])]


def test_an_unknown_setting_is_one_line_and_code_2(capsys, replace_training):
    replace_training(pytest.fail)
    code, out, err = run(capsys, "train", "algorithm.adv_estimater=gae")
    text = "error: no setting algorithm.adv_estimater; did you mean algorithm.adv_estimator?\n"
    assert (code, out, err) == (2, "", text)


REMOTE = "Traceback\n  rank code\nValueError: boom"
TWICE = f"boom in update\n\nTraceback of the worker:\n{REMOTE}"
STOPPED = "stopped; the same command continues with trainer.resume_mode=auto"


@pytest.mark.parametrize(
    ("error", "code", "first", "once"),
    [
        (
            DataError("row 3 of a.parquet:\nno prompt"),
            2,
            "error: row 3 of a.parquet: no prompt",
            "",
        ),
        (KeyboardInterrupt(), 130, STOPPED, ""),
        (LengthError("3 rows"), 1, "error: 3 rows", "test_command_line.py"),
        (WorkerMethodError("a: b", remote_traceback=REMOTE), 1, "error: a: b", "rank code"),
        (
            WorkerMethodError(TWICE, remote_traceback=REMOTE),
            1,
            "error: boom in update",
            "rank code",
        ),
    ],
    ids=["input", "interrupt", "controller", "worker", "worker with its traceback in the message"],
)
def test_an_error_of_a_run_is_shown_with_its_cause_first(
    capsys, replace_training, error, code, first, once
):
    """Errors of the input and interrupts have one line; the others also a traceback, once."""
    replace_training(raising(error))
    found, _, err = run(capsys, "train")
    assert (found, err.splitlines()[0]) == (code, first)
    assert err.count(once) == 1 if once else err == f"{first}\n"
    assert len(err.splitlines()) < 25


def test_other_exceptions_are_raised(replace_training):
    replace_training(raising(ZeroDivisionError()))
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


def test_config_reads_what_print_config_writes(capsys, tmp_path, replace_training):
    replace_training(pytest.fail)
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
