"""The page of architectures shows the tables that the tests use."""

from __future__ import annotations

from document import PAGE, page_with_tables


def test_page_has_the_current_tables():
    """`python tests/architectures/document.py` updates the page."""
    text = PAGE.read_text()
    assert text == page_with_tables(text)
