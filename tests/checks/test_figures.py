"""The package stays typed, and its folders stay small and described."""

import ast

import figures
import pytest
from figures import any_count, code_lines, modules_per_folder
from source_tree import SourceFile, package_files

ANY_PER_1000_LINES = 10.0
MODULES = 14  # in one folder

# Folders that may hold more modules, and how many. `algorithms` is the registry of formulas: a
# subfolder would separate a formula from the table that lists it.
LARGER_FOLDERS = {"src/quadriga/algorithms": 24}


def any_faults(files):
    """The package's share of `Any`, if it is too large."""
    share = 1000 * sum(map(any_count, files)) / sum(file.lines for file in files)
    limit = ANY_PER_1000_LINES
    return [] if share < limit else [f"{share:.1f} `Any` per 1000 lines, limit {limit}"]


def folder_faults(files):
    """Folders with too many modules."""
    return [
        f"{folder}: {count} modules"
        for folder, count in modules_per_folder(files).items()
        if count > LARGER_FOLDERS.get(folder, MODULES)
    ]


def init_faults(files):
    """Folders without an `__init__`, or with one that has no docstring."""
    inits = {file.folder: file for file in files if file.is_package}
    described = {folder for folder, file in inits.items() if ast.get_docstring(file.tree)}
    return sorted({file.folder for file in files} - described)


@pytest.mark.parametrize("faults", [any_faults, folder_faults, init_faults])
def test_the_package_is_typed_and_its_folders_are_small_and_described(faults):
    assert faults(package_files()) == []


def test_exceptions_are_needed():
    counts = modules_per_folder(package_files())
    assert [folder for folder in LARGER_FOLDERS if counts[folder] <= MODULES] == []


def source(text, name="src/quadriga/x/a.py"):
    return SourceFile(name, text)


def test_figures_by_hand(capsys, monkeypatch):
    text = "from typing import Any\nx: Any = 1  # why\nAnything = 2  # noqa: F401\n# drawn\n"
    files = [source(text), source('"""d"""', "src/quadriga/x/__init__.py")]
    assert [code_lines(file) for file in files] == [3, 0]
    monkeypatch.setattr(figures, "package_files", lambda: files)
    figures.main()
    assert capsys.readouterr().out.splitlines() == [
        "x                         3 lines of code     2 Any",
        "total                     3 lines of code     2 Any",
    ]


def test_planted_faults_are_reported():
    assert any_faults([source("x: Any = 1\n" + "x = 1\n" * 99)]) != []
    assert any_faults([source("x: Any = 1\n" + "x = 1\n" * 100)]) == []
    many = [source("x = 1", f"src/quadriga/x/m{i}.py") for i in range(MODULES + 1)]
    assert folder_faults(many) == ["src/quadriga/x: 15 modules"]
    assert folder_faults(many[1:]) == []


@pytest.mark.parametrize("init", [[], [source("x = 1", "src/quadriga/x/__init__.py")]])
def test_a_package_without_a_docstring_is_reported(init):
    assert init_faults([source("x = 1"), *init]) == ["src/quadriga/x"]
    described = source('"""What is inside."""', "src/quadriga/x/__init__.py")
    assert init_faults([source("x = 1"), described]) == []
