"""Error messages quote files and settings: they cannot change the terminal or fail to print."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from quadriga.errors import CallTimeoutError, DataError, FieldError, QuadrigaError

CASES = {
    "an escape sequence": ("a \x1b[2J\x1b[31mred\x1b[0m b", "a red b"),
    "half a surrogate pair": ("key \ud800 here", r"key \ud800 here"),
    "reversed writing": ("name \u202etxt.exe", r"name \u202etxt.exe"),
    "lines and tabs stay": ("one\n\ttwo – drei", "one\n\ttwo – drei"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cls", [QuadrigaError, DataError, FieldError, CallTimeoutError])
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
