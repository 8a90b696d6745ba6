"""A test fails without each of the guards: `remove_guards.py` takes them out of a copy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from guard_list import GUARDS
from remove_guards import ROOT, without_guard


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_the_code_of_a_guard_is_found(guard):
    """Fails if the guard has moved, so that the list follows the code."""
    file = ROOT / "src/quadriga" / guard.file
    changed = without_guard(file.read_text(), guard)
    compile(changed, guard.file, "exec")
    path, _, test = guard.test.partition("::")
    assert f"def {test.partition('[')[0]}(" in (ROOT / path).read_text()


def test_there_are_guards_enough():
    assert len({guard.old for guard in GUARDS}) >= 10


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_test_fails_without_each_guard():
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("remove_guards.py"))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("red\n") == len(GUARDS)
