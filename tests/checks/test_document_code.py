"""Every Python block of the README, of CONTRIBUTING and of docs/ runs."""

from concurrent.futures import ThreadPoolExecutor

import document_code
import pytest
from document_code import as_script, python_blocks, run_page
from source_tree import ROOT

NOT_RUN_AT_MOST = 5

PAGES = sorted(
    path
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    if python_blocks(path.read_text(encoding="utf-8"))
)


@pytest.fixture(scope="module")
def errors_of(request, tmp_path_factory):
    """Run the pages whose tests were chosen, two at a time. Return page -> future of its errors."""
    chosen = [item for item in request.session.items if item.originalname == PAGE_TEST]
    with ThreadPoolExecutor(2) as threads:
        yield {
            page: threads.submit(run_page, page, tmp_path_factory.mktemp("page"))
            for page in (item.callspec.params["page"] for item in chosen)
        }


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_the_blocks_of_a_page_run(page, errors_of):
    errors = errors_of[page].result()
    assert not errors, errors[-4000:]


PAGE_TEST = test_the_blocks_of_a_page_run.__name__


def not_run(pages):
    """(page, line, reason) of every block that is marked as not run."""
    return [
        (page.name, block.line, block.not_run)
        for page in pages
        for block in python_blocks(page.read_text(encoding="utf-8"))
        if block.not_run is not None
    ]


def test_few_blocks_are_left_out():
    assert len(not_run(PAGES)) <= NOT_RUN_AT_MOST, not_run(PAGES)


def page_of(tmp_path, *parts):
    page = tmp_path / "page.md"
    page.write_text("\n".join(parts) + "\n")
    return page


FIRST = "```python\nx = 1\n```"
SECOND = "```python\nassert x == 2\n```"


def test_blocks_share_a_namespace_and_run_in_order(tmp_path):
    good = "```python\nassert x == 1\nopen('written', 'w').close()\n```"
    assert run_page(page_of(tmp_path, "# Title", FIRST, "Text.", good), tmp_path) == ""
    assert (tmp_path / "written").exists()


def test_a_planted_fault_is_reported_with_the_line_of_the_page(tmp_path):
    errors = run_page(page_of(tmp_path, "# Title", FIRST, "Text.", SECOND), tmp_path)
    assert "AssertionError" in errors
    assert 'page.py", line 7' in errors


def test_a_block_that_is_marked_is_not_run(tmp_path):
    page = page_of(tmp_path, FIRST, "<!-- not run: your own file -->", "", SECOND)
    assert run_page(page, tmp_path) == ""
    assert not_run([page]) == [("page.md", 7, "your own file")]
    other = page_of(tmp_path, "<!-- not run: your own file -->", FIRST, SECOND)
    assert [block.not_run for block in python_blocks(other.read_text())] == ["your own file", None]


def test_an_endless_block_exceeds_its_time_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(document_code, "TIME_LIMIT_S", 1)
    page = page_of(tmp_path, "```python\nimport time\ntime.sleep(60)\n```")
    assert run_page(page, tmp_path).startswith("time limit of 1 s exceeded")


def test_only_python_is_run():
    text = "```bash\nexit 1\n```\n```text\nx = y\n```\n```\nz\n```\n" + FIRST
    assert [block.code for block in python_blocks(text)] == ["x = 1\n"]
    assert as_script(text).splitlines()[10] == "x = 1"
    for name in ("py", "Python"):
        assert len(python_blocks(FIRST.replace("python", name))) == 1
