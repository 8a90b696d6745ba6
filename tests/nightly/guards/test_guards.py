"""A test fails without each guard of `guard_list.py`. Only a copy of the project is changed.

pytest -m nightly tests/nightly/guards -k "os._exit"
"""

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from guard_list import GUARDS, Guard

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 300
MEMORY = 24 << 30  # bytes of address space: without a guard, a test may ask for more than there is
EACH = pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)


def without_guard(text: str, guard: Guard) -> str:
    """Return the text of a file without the guard, whose code must occur exactly once."""
    assert text.count(guard.old) == 1, f"the code of the guard has changed in {guard.file}"
    return text.replace(guard.old, guard.new)


def run_tests(folder: Path, tests: Sequence[str]) -> int:
    """Return the exit code of pytest: 0 if all tests pass, 1 if one fails, another if none ran."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", "-p", "no:cacheprovider", *tests],
        cwd=folder,
        # Without cached bytecode, which is chosen by time and size: both may stay equal.
        env={
            **os.environ,
            "PYTHONPATH": str(folder / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
        timeout=TIMEOUT_S * len(tests),
        check=False,
    ).returncode


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of what the tests need, in which they pass."""
    folder = tmp_path_factory.mktemp("project")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "tests", "docs", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    assert run_tests(folder, sorted({guard.test for guard in GUARDS})) == 0
    return folder


@EACH
def test_the_code_of_a_guard_is_found(guard):
    """Fails if the guard has moved, so that the list follows the code."""
    changed = without_guard((ROOT / "src/quadriga" / guard.file).read_text(), guard)
    compile(changed, guard.file, "exec")
    path, _, test = guard.test.partition("::")
    assert f"def {test.partition('[')[0]}(" in (ROOT / path).read_text()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@EACH
def test_a_test_fails_without_the_guard(guard, project):
    file = project / "src/quadriga" / guard.file
    text = file.read_text()
    file.write_text(without_guard(text, guard))
    try:
        assert run_tests(project, [guard.test]) == 1
    finally:
        file.write_text(text)
