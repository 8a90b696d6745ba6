"""docs/measurements/security.md lists at least 60 faults, each with a test that exists."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/measurements/security.md"
FILE = re.compile(r"tests/[\w/]+/test_\w+\.py")
TEST = re.compile(r"`(?:(?P<file>tests/[\w/]+\.py)::)?(?P<name>test_\w+)`")


@dataclass(frozen=True)
class Row:
    """A row of a table: what happens, its outcome, and the tests (file, name) that show it."""

    what: str
    outcome: str
    tests: tuple[tuple[str, str], ...]


def rows_of(text: str) -> list[Row]:
    """Return the rows of all tables whose last column is "test".

    A test without a file is in the last file that the text before the table names.
    """
    rows: list[Row] = []
    file, within = "", False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("|"):
            within = False
            file = found[-1] if (found := FILE.findall(line)) else file
        elif not within:
            within = cells[-1].rstrip(" |") == "test"
        elif within and not line.startswith("|---"):
            tests = [(m["file"] or file, m["name"]) for m in TEST.finditer(cells[-1])]
            rows.append(Row(cells[0], cells[1], tuple(tests)))
    return rows


def problems(text: str, root: Path) -> list[str]:
    """Return what is wrong with the rows of a page."""
    found = []
    for row in rows_of(text):
        if not row.tests or not row.outcome:
            found.append(f"{row.what}: no test or no outcome")
        for file, name in row.tests:
            path = root / file
            if not path.is_file() or not re.search(rf"^def {name}\(", path.read_text(), re.M):
                found.append(f"{row.what}: {file or 'no file'} has no {name}")
    return found


def test_every_row_names_a_test_that_exists():
    assert problems(PAGE.read_text(), ROOT) == []


def test_the_page_lists_sixty_artefacts_and_faults():
    rows = {row.what for row in rows_of(PAGE.read_text())}
    assert len(rows) >= 60


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.glob("test_*.py")), ids=str)
def test_the_pages_name_every_file_of_this_folder(path):
    if path != Path(__file__):
        assert path.name in PAGE.read_text() + (ROOT / "docs/security.md").read_text()


def test_planted_faults_are_found(tmp_path):
    (tmp_path / "tests/a").mkdir(parents=True)
    (tmp_path / "tests/a/test_b.py").write_text("def test_c():\n    pass\n")
    page = "`tests/a/test_b.py`:\n\n| x | outcome | test |\n|---|---|---|\n"
    assert problems(page + "| p | q | `test_c` |\n", tmp_path) == []
    assert problems(page + "| p | q | `tests/a/test_b.py::test_c` |\n", tmp_path) == []
    assert problems(page + "| p | q | `test_d` |\n", tmp_path) == [
        "p: tests/a/test_b.py has no test_d"
    ]
    assert problems(page + "| p | q | |\n", tmp_path) == ["p: no test or no outcome"]
    assert len(rows_of(page + "| p | q | `test_c` |\n\n| a | b |\n|---|---|\n| c | d |\n")) == 1
