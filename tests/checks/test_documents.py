"""What the documents say is true: links lead somewhere, commands are read by the program."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from source_tree import ROOT

from quadriga.cli.main import parse
from quadriga.config.loading import load_config

LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def documents() -> list[Path]:
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return sorted(found)


def broken_links(text: str, folder: Path) -> list[str]:
    """Relative targets that do not exist, headings within a page included."""
    broken = []
    for match in LINK.finditer(text):
        target, _, heading = match["target"].partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        path = folder / target
        anchors = headings(path.read_text() if path.is_file() else text) if heading else set()
        if not path.exists() or (heading and heading not in anchors):
            broken.append(match["target"])
    return broken


def headings(text: str) -> set[str]:
    """A page's anchors, as they are made of its headings."""
    titles = re.findall(r"^#+\s+(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(text: str) -> list[str]:
    """`quadriga …` lines of the code blocks, continued lines joined, prompts and paths removed."""
    joined = "\n".join(BLOCK.findall(text)).replace("\\\n", " ")
    lines = (re.sub(r"^\s*(\$ )?(\.venv/bin/)?", "", line) for line in joined.splitlines())
    return [line for line in lines if line.startswith("quadriga ")]


def check_command(line: str) -> None:
    """Raise unless the program reads this line: command, options and every setting."""
    words = shlex.split(line, comments=True)[1:]
    words = words[: next((i for i, word in enumerate(words) if word in "|>&&;"), len(words))]
    if "--help" in words or "--version" in words:
        return
    read = parse(words)
    if read.command.settings is not None:
        load_config(read.command.settings, read.overrides)


@pytest.mark.parametrize("path", documents(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path):
    assert broken_links(path.read_text(), path.parent) == []


@pytest.mark.parametrize("path", documents(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_commands_are_read(path):
    for line in commands(path.read_text()):
        check_command(line)


def test_planted_faults_are_seen(tmp_path):
    assert broken_links("see [x](absent.md)", tmp_path) == ["absent.md"]
    assert broken_links("# A b\n[x](#a-b) [y](#c)", tmp_path) == ["#c"]
    assert commands("```bash\n$ quadriga train \\\n  data.sede=1\n```") == [
        "quadriga train    data.sede=1"
    ]
    with pytest.raises(ValueError, match=r"did you mean data\.seed"):
        check_command("quadriga train data.sede=1")
    with pytest.raises(SystemExit):
        check_command("quadriga trian")
