"""Messages and tables quote files and data: they cannot change the terminal or fail to print."""

import io
import logging
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from quadriga import errors
from quadriga.cli import main
from quadriga.cli.show import show_evaluation, show_responses
from quadriga.config.commands import EvalConfig
from quadriga.config.secrets import mask_logs
from quadriga.observability.console import RunConsole, progress
from quadriga.trainer.evaluation import Answer, Evaluation
from quadriga.trainer.validation import Estimate, SourceSummary

CASES = {
    "an escape sequence": ("a \x1b[2J\x1b[31mred\x1b[0m b", "a red b"),
    "half a surrogate pair": ("key \ud800 here", r"key \ud800 here"),
    "reversed writing": ("name \u202etxt.exe", r"name \u202etxt.exe"),
    "lines and tabs stay": ("one\n\ttwo – drei", "one\n\ttwo – drei"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "cls", [errors.QuadrigaError, errors.DataError, errors.FieldError, errors.CallTimeoutError]
)
def test_a_message_is_printable(cls, case):
    given, shown = CASES[case]
    error = cls(given)
    assert shown in str(error)
    assert shown in str(pickle.loads(pickle.dumps(error)))
    str(error).encode()


def test_a_setting_with_an_escape_sequence_is_shown_harmless():
    name = "trainer.\x1b[2Jtotal_training_stepz=3"
    run = subprocess.run(
        [Path(sys.executable).with_name("quadriga"), "train", name], capture_output=True, timeout=60
    )
    assert run.returncode == 2 and b"\x1b" not in run.stderr and b"stepz" in run.stderr


HOSTILE = "[/red]\x1b[2J\x1b]0;title\x07[bold]x"
SHOWN = "[/red]\\x1b]0;title\\x07[bold]x"


class Terminal(io.StringIO):
    """A text file that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def a_log_record() -> None:
    logging.getLogger("quadriga").warning("%s", HOSTILE)


def an_error(error: Exception) -> Callable[[], None]:
    def print_it() -> None:
        with mock.patch.object(main, "parse", side_effect=error):
            assert main.main(["doctor"]) == 1

    return print_it


def the_table_of_eval() -> None:
    summary = SourceSummary(HOSTILE, 1, 1, {"pass@1": Estimate(0.5, None, None)})
    done = Evaluation(Path(HOSTILE), (summary,), 0, 0, {f"agent/{HOSTILE}": 1.0})
    with mock.patch("quadriga.trainer.evaluation.run_evaluation", return_value=done):
        show_evaluation(EvalConfig())


def responses() -> None:
    show_responses([Answer([{"role": "user", "content": HOSTILE}], [HOSTILE, "b"])])


def the_console_of_a_run() -> None:
    console = RunConsole(2, title=HOSTILE)
    console.log(1, {"reward/mean": 1.0})
    console.note(HOSTILE)
    console.table(HOSTILE, [(HOSTILE, HOSTILE)])


def a_progress_bar() -> None:
    with progress(HOSTILE, 2, file=sys.stdout) as advance:
        advance(1)


@pytest.mark.parametrize("print_it", [
    a_log_record, the_table_of_eval, responses, the_console_of_a_run, a_progress_bar,
    an_error(OSError(HOSTILE)), an_error(errors.WorkerMethodError("no", remote_traceback=HOSTILE)),
])  # fmt: skip
def test_text_of_data_cannot_change_the_terminal(print_it, monkeypatch) -> None:
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "300")
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, terminal)
    monkeypatch.setattr(logging, "lastResort", logging.StreamHandler(terminal))
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.getLogger("quadriga"), "propagate", True)
    mask_logs()
    print_it()
    text = terminal.getvalue()
    assert SHOWN in text and not re.search(r"\x1b(\[2J|\])", text), text


def test_a_pipe_gets_the_bytes_of_responses(capsys) -> None:
    show_responses([Answer([], [HOSTILE])])
    assert capsys.readouterr().out == f"{HOSTILE}\n"
