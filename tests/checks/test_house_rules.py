"""Rules that are about the tree as a whole."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from source_tree import PACKAGE, ROOT, SourceFile, all_python_files, package_files

SUFFIXES = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".cfg", ".ini", ".sh", ""}
MACHINE = re.compile(
    r"(?<![\w.])/(home|Users|work|opt|root|mnt|scratch|data\d*)/[\w.-]+"  # a person's folders
    r"|https?://[\w.-]*(pypi|index|mirror|proxy|artifactory|nexus)[\w.-]*"  # a registry
    r"|--(extra-)?index-url[ =]+http",
    re.IGNORECASE,
)
MODULE_WORDS = {"utils", "util", "helpers", "helper", "misc", "common"}


def tracked_files() -> list[Path]:
    """Files of the project: git's list, or the whole tree where git is not there."""
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        return [p for p in ROOT.rglob("*") if p.is_file() and ".venv" not in p.parts]
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def machine_words(text: str) -> list[str]:
    """Paths of somebody's machine and names of package registries."""
    return [match.group(0) for match in MACHINE.finditer(text)]


def broad_handlers(file: SourceFile) -> list[str]:
    """`except Exception:` that neither raises again nor says on its line why it need not."""
    return [
        f"{file.name}:{node.lineno}"
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException"))
        and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
        and "  # " not in file.text.splitlines()[node.lineno - 1]
    ]


def test_no_module_without_a_concept():
    names = [p.relative_to(ROOT) for p in PACKAGE.rglob("*") if p.stem in MODULE_WORDS]
    assert names == []


def test_no_path_of_a_machine_and_no_registry():
    faults = {}
    for path in tracked_files():
        if path.suffix in SUFFIXES and path != Path(__file__).resolve():
            found = machine_words(path.read_text(encoding="utf-8", errors="replace"))
            if found:
                faults[path.relative_to(ROOT).as_posix()] = found
    assert faults == {}


@pytest.mark.parametrize(
    "text",
    [
        "open('/home/ann/x')",
        "see /work/shared/x.md",
        "--index-url https://a.b",
        "http://pypi.corp/",
    ],
)
def test_planted_machine_words_are_seen(text):
    assert machine_words(text)


@pytest.mark.parametrize("text", ["runs/run", "/tmp/x", "arxiv.org/abs/2409.19256", "a/work/b"])
def test_ordinary_paths_pass(text):
    assert machine_words(text) == []


def test_errors_are_not_swallowed():
    assert [fault for file in package_files() for fault in broad_handlers(file)] == []


def test_a_planted_swallower_is_seen():
    text = "try:\n    x()\nexcept Exception:\n    pass\n"
    assert broad_handlers(SourceFile("src/quadriga/x.py", text))
    for better in (text.replace("pass", "raise"), text.replace("n:\n", "n:  # it is shipped\n")):
        assert broad_handlers(SourceFile("src/quadriga/x.py", better)) == []


def test_test_files_have_names_of_their_own():
    names = Counter(p.name for p in (ROOT / "tests").rglob("*.py") if p.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_no_notes_to_self():
    faults = [
        f"{file.name}:{number}"
        for file in all_python_files()
        for number, line in enumerate(file.text.splitlines(), start=1)
        if re.search(r"#\s*(TODO|FIXME|XXX|HACK)\b", line)
    ]
    assert faults == []
