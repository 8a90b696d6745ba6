"""The code stays within its budget of lines and files.

`BUDGET.md` lies in the folder `shared` beside the checkout of a developer and has one row for each
stage of the project. Without that page, for example in the clone of a user, `LIMITS` hold.
"""

from __future__ import annotations

import re

import pytest
from figures import code_lines
from source_tree import ROOT, SourceFile, all_python_files

STAGE = "the lighter house"
"""The row of the page that is in force. Each later stage names its own row here."""

PAGE = ROOT.parent / "shared/BUDGET.md"
LINES, FILES = "code lines of the package", "files of the package"
LIMITS = {
    LINES: 42_000,
    FILES: 330,
    "code lines without compat/verl": 38_000,
    "code lines of the tests": 36_000,
}
STILL = {
    LINES: 43_611,
    "code lines without compat/verl": 40_115,
    "code lines of the tests": 37_794,
}
"""What is over its limit today. Numbers are lowered, never raised; a row within its limit goes."""


def limits(page: str | None) -> dict[str, int]:
    """Limits with the lines and files of a row `| the lighter house | 42 000 | 330 |`."""
    if page is None:
        return LIMITS
    number = r"([\d \u202f]+)"
    row = re.search(rf"^\| {re.escape(STAGE)} \| {number} \| {number} \|", page, re.MULTILINE)
    assert row, f"{PAGE.name} has no row {STAGE!r}"
    lines, files = (int(re.sub(r"\D", "", text)) for text in row.groups())
    return {**LIMITS, LINES: lines, FILES: files}


def weights(files: list[SourceFile]) -> dict[str, int]:
    package = [file for file in files if file.name.startswith("src/quadriga/")]
    own = [file for file in package if not file.name.startswith("src/quadriga/compat/verl/")]
    tests = [file for file in files if file.name.startswith("tests/")]
    lines = [sum(map(code_lines, some)) for some in (package, own, tests)]
    return dict(zip(LIMITS, (lines[0], len(package), *lines[1:]), strict=True))


def faults(found: dict[str, int], most: dict[str, int]) -> list[str]:
    return [f"{what}: {n} > {most[what]}" for what, n in found.items() if n > most[what]]


def test_the_code_is_within_its_budget():
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else None
    assert faults(weights(all_python_files()), {**limits(page), **STILL}) == []


def test_the_page_has_the_row_of_the_stage():
    found = limits(f"| streams | 1 | 2 |\n| {STAGE} | 41 000 | 320 |\n")
    assert (found[LINES], found[FILES]) == (41_000, 320)
    with pytest.raises(AssertionError, match="no row"):
        limits("| streams | 49 300 | 375 |")


def test_what_is_over_budget_is_named():
    package = SourceFile("src/quadriga/x.py", '"""Doc."""\n\n# why\nx = 1\ny = 2\n')
    verl = SourceFile("src/quadriga/compat/verl/x.py", "x = 1\n")
    found = weights([package, verl, SourceFile("tests/test_x.py", "x = 1\n")])
    assert list(found.values()) == [3, 2, 2, 1]
    assert faults(found, dict.fromkeys(LIMITS, 2)) == ["code lines of the package: 3 > 2"]
