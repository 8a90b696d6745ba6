"""The code stays within its budget of lines and files.

`BUDGET.md` lies in the folder `shared` beside the checkout of a developer and has one row for each
stage of the project. Without that page, for example in the clone of a user, `LIMITS` hold.
"""

import re

import pytest
from figures import code_lines
from source_tree import ROOT, SourceFile, all_python_files

STAGES = (
    "the lighter house", "the specification in verl's spelling", "what the attack broke",
    "runs that outlive their machines", "real engines on real machines",
    "people: Python API, report, clusters", "streams", "agents",
)  # fmt: skip
"""The rows of the page that are in force: the first one, and those that have added to it."""

PAGE = ROOT.parent / "shared/BUDGET.md"
LINES, FILES = "code lines of the package", "files of the package"
COMPAT, TESTS = "code lines of compat/verl", "code lines of the tests"
LIMITS = {LINES: 51_500, FILES: 390}
HOUSE = {LINES: 42_000, COMPAT: 4_000, TESTS: 36_000}
"""What was allowed when the house was light. Later lines are none of compat/verl, and have 0.8
lines of tests each."""


def limits(page: str | None) -> dict[str, int]:
    """Limits with the lines and files of rows `| the lighter house | 42 000 | 330 |`. A row adds
    its difference from the one above it."""
    found = dict(LIMITS)
    if page is not None:
        number = r"([\d \u202f]+)"
        rows = re.findall(rf"^\| ([^|]+) \| {number} \| {number} \|", page, re.MULTILINE)
        sizes = {name: [int(re.sub(r"\D", "", text)) for text in given] for name, *given in rows}
        missing = [name for name in STAGES if name not in sizes]
        assert not missing, f"{PAGE.name} has no row {missing[0]!r}"
        before = dict(zip(list(sizes)[1:], sizes.values(), strict=False))
        for i, what in enumerate((LINES, FILES)):
            added = [sizes[name][i] - before[name][i] for name in STAGES[1:]]
            found[what] = sizes[STAGES[0]][i] + sum(added)
    later = found[LINES] - HOUSE[LINES]
    return {**found, COMPAT: HOUSE[COMPAT], TESTS: HOUSE[TESTS] + later * 8 // 10}


def weights(files: list[SourceFile]) -> dict[str, int]:
    package = [file for file in files if file.name.startswith("src/quadriga/")]
    compat = [file for file in package if file.name.startswith("src/quadriga/compat/verl/")]
    tests = [file for file in files if file.name.startswith("tests/")]
    lines = [sum(map(code_lines, some)) for some in (package, compat, tests)]
    return {LINES: lines[0], FILES: len(package), COMPAT: lines[1], TESTS: lines[2]}


def faults(found: dict[str, int], most: dict[str, int]) -> list[str]:
    return [f"{what}: {n} > {most[what]}" for what, n in found.items() if n > most[what]]


def test_the_code_is_within_its_budget():
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else None
    assert faults(weights(all_python_files()), limits(page)) == []


def test_a_row_adds_its_difference_and_must_be_on_the_page():
    rows = f"| before | 9 | 9 |\n| {STAGES[0]} | 41 000 | 320 |\n| other | 43 000 | 321 |\n"
    later = "".join(f"| {name} | {43_500 + i} | {323 + i} |\n" for i, name in enumerate(STAGES[1:]))
    found = limits(f"{rows}{later}| later | 99 000 | 999 |\n")
    assert list(found.values()) == [41_506, 328, 4_000, 35_604]
    with pytest.raises(AssertionError, match=r"no row .the specification in verl's"):
        limits(rows)


def test_what_is_over_budget_is_named():
    package = SourceFile("src/quadriga/x.py", '"""Doc."""\n\n# why\nx = 1\ny = 2\n')
    verl = SourceFile("src/quadriga/compat/verl/x.py", "x = 1\n")
    found = weights([package, verl, SourceFile("tests/test_x.py", "x = 1\n")])
    assert list(found.values()) == [3, 2, 1, 1]
    assert faults(found, dict.fromkeys(found, 2)) == ["code lines of the package: 3 > 2"]
