"""`tests/compat/rows.txt` names the tests of each capability, and the page shows this table.

python tests/checks/test_capabilities.py writes the page.
"""

import re
from pathlib import Path

from source_tree import ROOT

TABLE, PAGE = ROOT / "tests/compat/rows.txt", ROOT / "docs/measurements/rows.md"
HEAD = """# Capabilities and their tests

What a system of this design has, and the test of each.
`python tests/checks/test_capabilities.py` writes the page from
[the table](../../tests/compat/rows.txt). Names in verl's spelling are tested in that spelling.
"""


def page_of(table: str) -> str:
    """The page: a section for each `[title]`, a row for each `number | capability | tests`."""
    lines = [HEAD]
    for line in table.splitlines():
        if line.startswith("["):
            lines.append(f"\n## {line[1:-1]}\n\n| row | capability | test |\n|---|---|---|\n")
            continue
        number, capability, tests = line.split(" | ")
        named = [test.split("::") for test in tests.split()]
        links = ", ".join(f"[`{names[-1]}`](../../tests/{file})" for file, *names in named)
        lines.append(f"| {number} | {capability} | {links} |\n")
    return "".join(lines)


def faults(table: str, tests: Path) -> list[str]:
    """Rows that are missing or twice there, and tests that no file defines."""
    rows = [line.split(" | ") for line in table.splitlines() if not line.startswith("[")]
    numbers = [int(row[0]) for row in rows]
    found = [] if numbers == list(range(1, 128)) else [f"rows {numbers}, expected 1 to 127"]
    for number, _, named in rows:
        for test in named.split():
            file, _, name = test.partition("::")
            text = (tests / file).read_text() if (tests / file).is_file() else ""
            if not re.search(rf"^ *(async )?def {name.split('::')[-1]}\(", text, re.M):
                found.append(f"row {number}: no test {test}")
    return found


def test_every_row_has_tests_that_exist_and_the_page_shows_them():
    table = TABLE.read_text()
    assert faults(table, ROOT / "tests") == []
    assert PAGE.read_text() == page_of(table), f"run python {Path(__file__).relative_to(ROOT)}"


def test_planted_faults_are_found(tmp_path):
    (tmp_path / "test_a.py").write_text("def test_b():\n    pass\n")
    rows = "".join(f"{i} | x | test_a.py::test_b\n" for i in range(1, 127))
    for last, fault in (("test_a.py::test_c", "row 127"), ("test_d.py::test_b", "row 127")):
        assert faults(f"[A]\n{rows}127 | x | {last}\n", tmp_path)[0].startswith(fault)
    assert "expected 1 to 127" in faults(rows, tmp_path)[0]


if __name__ == "__main__":
    PAGE.write_text(page_of(TABLE.read_text()))
