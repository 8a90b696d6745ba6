"""Rules for the tree as a whole: file names, error handlers, no traces of a machine."""

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path

from source_tree import PACKAGE, ROOT, SourceFile, all_python_files, package_files

SUFFIXES = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".cfg", ".ini", ".sh", ""}
MACHINE = re.compile(
    r"(?<![\w.])/(home|Users|work|opt|root|mnt|scratch|data\d*)/[\w.-]+"  # folders of a user
    r"|https?://[\w.-]*(pypi|index|mirror|proxy|artifactory|nexus)[\w.-]*"  # a package registry
    r"|--(extra-)?index-url[ =]+http",
    re.IGNORECASE,
)
MODULE_WORDS = {"utils", "util", "helpers", "helper", "misc", "common"}


def tracked_files() -> list[Path]:
    """Files of the project: those that git lists, or the whole tree if git is not available."""
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        return [p for p in ROOT.rglob("*") if p.is_file() and ".venv" not in p.parts]
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def machine_traces(text: str) -> list[str]:
    """Absolute paths of a machine and addresses of package registries."""
    return [match.group(0) for match in MACHINE.finditer(text)]


def broad_handlers(file: SourceFile) -> list[str]:
    """`except Exception:` without a `raise` and without a comment that gives the reason."""
    return [
        f"{file.name}:{node.lineno}"
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException"))
        and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
        and "  # " not in file.text.splitlines()[node.lineno - 1]
    ]


def test_no_module_is_named_utils():
    names = [p.relative_to(ROOT) for p in PACKAGE.rglob("*") if p.stem in MODULE_WORDS]
    assert names == []


def test_no_paths_of_a_machine_and_no_registries():
    faults = {}
    for path in tracked_files():
        if path.suffix in SUFFIXES and path != Path(__file__).resolve():
            found = machine_traces(path.read_text(encoding="utf-8", errors="replace"))
            if found:
                faults[path.relative_to(ROOT).as_posix()] = found
    assert faults == {}


def test_planted_paths_of_a_machine_are_reported():
    for text in ("open('/home/ann/x')", "--index-url https://a.b", "http://pypi.corp/"):
        assert machine_traces(text)
    for text in ("runs/run", "/tmp/x", "arxiv.org/abs/2409.19256", "a/work/b"):
        assert machine_traces(text) == []


def test_errors_are_not_ignored():
    faults = [fault for file in package_files() for fault in broad_handlers(file)]
    assert not faults, "\n".join(faults)


def test_a_planted_handler_is_reported():
    text = "try:\n    x()\nexcept Exception:\n    pass\n"
    assert broad_handlers(SourceFile("src/quadriga/x.py", text))
    for better in (text.replace("pass", "raise"), text.replace("n:\n", "n:  # returned\n")):
        assert broad_handlers(SourceFile("src/quadriga/x.py", better)) == []


def test_names_of_test_files_are_unique():
    names = Counter(p.name for p in (ROOT / "tests").rglob("*.py") if p.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_no_open_tasks_in_comments():
    faults = [
        f"{file.name}:{number}"
        for file in all_python_files()
        for number, line in enumerate(file.text.splitlines(), start=1)
        if re.search(r"#\s*(TODO|FIXME|XXX|HACK)\b", line)
    ]
    assert faults == []
