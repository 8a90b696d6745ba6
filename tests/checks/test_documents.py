"""Links have targets, the program accepts the commands, and the names of the package exist."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
from source_tree import ROOT

from quadriga.cli.main import parse
from quadriga.config.loading import load_config

LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
NAME = re.compile(r"`(quadriga(?:\.\w+)+)`")
BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def documents() -> list[Path]:
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return sorted(found)


def broken_links(text: str, folder: Path) -> list[str]:
    """Relative links whose file or heading does not exist."""
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
    """The anchors of a page: `## Two words` has the anchor `two-words`."""
    titles = re.findall(r"^#+\s+(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(text: str) -> list[str]:
    """The `quadriga …` lines of the code blocks, with continued lines joined, without prompts."""
    joined = "\n".join(BLOCK.findall(text)).replace("\\\n", " ")
    lines = (re.sub(r"^\s*(\$ )?(\.venv/bin/)?", "", line) for line in joined.splitlines())
    return [line for line in lines if line.startswith("quadriga ")]


def check_command(line: str) -> None:
    """Raise an error unless the program accepts the command, its options and every setting."""
    words = shlex.split(line, comments=True)[1:]
    words = words[: next((i for i, word in enumerate(words) if word in "|>&&;"), len(words))]
    if "--help" in words or "--version" in words:
        return
    parsed = parse(words)
    if parsed.command.settings is not None:
        load_config(parsed.command.settings, parsed.overrides)


def missing_names(text: str) -> list[str]:
    """The names such as `quadriga.errors.ConfigError` that no module of the package defines."""
    return sorted(name for name in set(NAME.findall(text)) if not is_defined(name))


def is_defined(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[count:]:
            found = getattr(found, attribute, None)
        return found is not None
    return False


@pytest.mark.parametrize("path", documents(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_have_targets(path):
    assert broken_links(path.read_text(), path.parent) == []


@pytest.mark.parametrize("path", documents(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_commands_are_accepted(path):
    for line in commands(path.read_text()):
        check_command(line)


def test_the_names_of_the_package_exist():
    sources = [*documents(), *sorted((ROOT / "src").rglob("*.py"))]
    missing = {path.relative_to(ROOT): missing_names(path.read_text()) for path in sources}
    assert {path: names for path, names in missing.items() if names} == {}


def test_planted_faults_are_reported(tmp_path):
    planted = "`quadriga.errors.ConfigError` `quadriga.algorithms.register_policy_loss`"
    assert missing_names(planted) == ["quadriga.algorithms.register_policy_loss"]
    assert broken_links("see [x](absent.md)", tmp_path) == ["absent.md"]
    assert broken_links("# A b\n[x](#a-b) [y](#c)", tmp_path) == ["#c"]
    found = commands("```bash\n$ quadriga train \\\n  data.sede=1\n```")
    assert found == ["quadriga train    data.sede=1"]
    with pytest.raises(ValueError, match=r"did you mean data\.seed"):
        check_command("quadriga train data.sede=1")
    with pytest.raises(SystemExit):
        check_command("quadriga trian")
