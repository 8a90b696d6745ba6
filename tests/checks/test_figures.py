"""The package stays typed, and its folders stay small and described."""

from __future__ import annotations

import ast
import json
import runpy

import pytest
from figures import any_count, comment_count, figures, modules_per_folder, per_1000_lines
from source_tree import ROOT, SourceFile, package_files

ANY_PER_1000_LINES = 10.0
MODULES = 14  # in one folder

# Folders that may hold more modules, how many, and why.
LARGER_FOLDERS = {
    "src/quadriga/algorithms": (
        24,
        "The registry of formulas: one estimator family, loss or correction per file, all of one "
        "kind. A subfolder would separate a formula from the table that lists it.",
    ),
}


def any_faults(files):
    """The package's share of `Any`, if it is too large."""
    lines = sum(file.lines for file in files)
    share = per_1000_lines(sum(map(any_count, files)), lines)
    limit = ANY_PER_1000_LINES
    return [] if share < limit else [f"{share} `Any` per 1000 lines, limit {limit}"]


def folder_faults(files):
    """Folders with too many modules."""
    faults = []
    for folder, count in modules_per_folder(files).items():
        limit, _ = LARGER_FOLDERS.get(folder, (MODULES, ""))
        if count > limit:
            faults.append(f"{folder}: {count} modules > {limit}")
    return faults


def init_faults(files):
    """Folders without an `__init__`, or with one that has no docstring."""
    inits = {file.folder: file for file in files if file.is_package}
    described = {folder for folder, file in inits.items() if ast.get_docstring(file.tree)}
    return sorted({file.folder for file in files} - described)


def test_few_values_are_untyped():
    faults = any_faults(package_files())
    assert not faults, "\n".join(faults)


def test_folders_are_small():
    faults = folder_faults(package_files())
    assert not faults, "\n".join(faults)


def test_every_package_says_what_it_contains():
    faults = init_faults(package_files())
    assert not faults, "\n".join(faults)


def test_exceptions_are_needed():
    counts = modules_per_folder(package_files())
    assert [folder for folder in LARGER_FOLDERS if counts.get(folder, 0) <= MODULES] == []


def test_the_script_prints_json(capsys):
    runpy.run_path(str(ROOT / "tests/checks/figures.py"), run_name="__main__")
    printed = json.loads(capsys.readouterr().out)
    assert printed["total"]["lines"] == sum(file.lines for file in package_files())


def source(text, name="src/quadriga/x/a.py"):
    return SourceFile(name, text)


def test_figures_by_hand():
    text = "from typing import Any\nx: Any = 1  # why\nAnything = 2  # noqa: F401\n# drawn\n"
    long = source("x = 1\n" * 801, "src/quadriga/y/b.py")
    found = figures([source(text), long, source('"""d"""', "src/quadriga/x/__init__.py")])
    assert found["packages"]["x"] == {
        "lines": 5,
        "code_lines": 3,
        "any": 2,
        "any_per_1000_lines": 400.0,
        "comments": 2,
        "comments_per_1000_lines": 400.0,
    }
    assert found["total"]["lines"] == 806
    assert found["modules_per_folder"] == {"src/quadriga/x": 1, "src/quadriga/y": 1}
    assert found["files_above_800_lines"] == {"src/quadriga/y/b.py": 801}
    assert found["files_under_25_lines"] == {"src/quadriga/x/a.py": 4}
    assert comment_count(source("x = '# no comment'\n")) == 0


def test_planted_faults_are_reported():
    assert any_faults([source("x: Any = 1\n" + "x = 1\n" * 99)]) != []
    assert any_faults([source("x: Any = 1\n" + "x = 1\n" * 100)]) == []
    many = [source("x = 1", f"src/quadriga/x/m{i}.py") for i in range(MODULES + 1)]
    assert folder_faults(many) == ["src/quadriga/x: 15 modules > 14"]
    assert folder_faults(many[1:]) == []
    allowed, _ = LARGER_FOLDERS["src/quadriga/algorithms"]
    formulas = [source("", f"src/quadriga/algorithms/m{i}.py") for i in range(allowed + 1)]
    assert folder_faults(formulas) == ["src/quadriga/algorithms: 25 modules > 24"]


@pytest.mark.parametrize("init", [[], [source("x = 1", "src/quadriga/x/__init__.py")]])
def test_a_package_without_a_docstring_is_reported(init):
    assert init_faults([source("x = 1"), *init]) == ["src/quadriga/x"]
    described = source('"""What is inside."""', "src/quadriga/x/__init__.py")
    assert init_faults([source("x = 1"), described]) == []
