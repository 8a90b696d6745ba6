"""The table of idioms names every program, and no test that is missing."""

import re
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
PAGE = PROGRAMS / "README.md"


def named_on_page(page: str) -> set[str]:
    """The tests in the last column of the table below "## Idioms"."""
    section = page.partition("\n## Idioms\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")][2:]
    return {name for row in rows for name in re.findall(r"`(test_\w+)`", row.rsplit("|", 2)[1])}


def defined_in_programs() -> set[str]:
    files = PROGRAMS.glob("test_*.py")
    return {
        name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
    }


def test_the_table_and_the_programs_agree():
    page, programs = named_on_page(PAGE.read_text()), defined_in_programs()
    assert (sorted(page - programs), sorted(programs - page)) == ([], [])
    assert len(programs) >= 40
