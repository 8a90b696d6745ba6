"""Take each guard of `guard_list.py` out, and show that a test fails without it.

    python tests/nightly/guards/remove_guards.py [NAME …]

The package and the tests are copied to a temporary folder, and only the copy is changed. The tests
run on the unchanged copy first: one that fails there shows nothing. Each row of the table ends with
one of these words:

    red       the test fails without the guard
    GREEN     the test passes without the guard, so nothing tests it
    BROKEN    the test fails with the guard, or cannot run without it
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(Path(__file__).parent))
from guard_list import GUARDS, Guard  # noqa: E402

TIMEOUT_S = 300
MEMORY = 24 << 30  # bytes of address space: without a guard, a test may ask for more than there is


def without_guard(text: str, guard: Guard) -> str:
    """Return the text of a file without the guard, whose code must occur exactly once."""
    count = text.count(guard.old)
    if count != 1:
        raise ValueError(f"{guard.name}: its code occurs {count} times in {guard.file}")
    return text.replace(guard.old, guard.new)


def copy_project(folder: Path) -> None:
    """Copy what the tests need: the package, the tests, and the settings of pytest."""
    for name in ("src", "tests", "docs", "examples", "benchmarks"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)


def environment(folder: Path) -> dict[str, str]:
    # Without cached bytecode, which is chosen by time and size: both may stay equal.
    return {
        **os.environ,
        "PYTHONPATH": str(folder / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }


def check_import(folder: Path) -> None:
    """Raise `RuntimeError` unless the tests would import the package of the copy."""
    found = subprocess.run(
        [sys.executable, "-c", "import quadriga; print(quadriga.__file__)"],
        cwd=folder, env=environment(folder), capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    if not found.startswith(str(folder)):
        raise RuntimeError(f"the tests would import {found}, not the copy in {folder}")


def run_tests(folder: Path, tests: Sequence[str]) -> int:
    """Return the exit code of pytest: 0 if all tests pass, 1 if one fails, another if none ran."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        return subprocess.run(
            command,
            cwd=folder,
            env=environment(folder),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
            timeout=TIMEOUT_S * len(tests),
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        return -1


def passing(folder: Path, guards: Sequence[Guard]) -> set[str]:
    """Return the tests that pass on the unchanged copy; all in one run if none fails."""
    tests = sorted({guard.test for guard in guards})
    if run_tests(folder, tests) == 0:
        return set(tests)
    return {test for test in tests if run_tests(folder, [test]) == 0}


def verdict(folder: Path, guard: Guard) -> str:
    """Run the guard's test on the copy without the guard; the copy is restored."""
    file = folder / "src/quadriga" / guard.file
    text = file.read_text()
    file.write_text(without_guard(text, guard))
    try:
        code = run_tests(folder, [guard.test])
    finally:
        file.write_text(text)
    return {0: "GREEN", 1: "red"}.get(code, "BROKEN")


def main(names: Sequence[str]) -> int:
    """Print the table and return 0 if every row is red, else 1."""
    chosen = [guard for guard in GUARDS if not names or guard.name in names]
    red = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_project(folder)
        check_import(folder)
        intact = passing(folder, chosen)
        for guard in chosen:
            word = verdict(folder, guard) if guard.test in intact else "BROKEN"
            red += word == "red"
            test = guard.test.partition("::")[2]
            print(f"{guard.name:<46} {guard.file:<28} {test:<70} {word}", flush=True)
    print(f"{red} of {len(chosen)} guards: a test fails without it")
    return 0 if chosen and red == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
