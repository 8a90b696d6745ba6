"""A hook of mkdocs: links from pages to files outside of docs/ become the paths of these files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: object) -> str:
    """Return the text of a page, in which every link has a target on the site."""
    docs = Path(config["docs_dir"]).resolve()

    def inside(link: re.Match[str]) -> str:
        target = (Path(page.file.abs_src_path).parent / link[2]).resolve()
        known = "://" in link[2] or link[2].startswith("mailto:") or target.is_relative_to(docs)
        return link[0] if known else f"{link[1]} (`{target.relative_to(docs.parent)}`)"

    return LINK.sub(inside, markdown)
