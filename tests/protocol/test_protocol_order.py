"""The room can be read from the top: no file imports from one that comes after it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import quadriga.protocol as protocol

ROOM = Path(protocol.__file__).parent
PAGE = ROOM.parents[2] / "docs/concepts/data.md"


def order_on_the_page() -> list[str]:
    """The files of the table, row by row."""
    table = PAGE.read_text().split("| files of `protocol/` |")[1].split("\n\n")[0]
    return [
        name
        for line in table.splitlines()
        for name in re.findall(r"`(\w+)\.py`", line.split("|")[1] if "|" in line else "")
    ]


def imports(source: str) -> set[str]:
    """Files of the room that a source imports, at its top, inside functions, for types only."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "quadriga.protocol":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= set(re.findall(r"^quadriga\.protocol\.(\w+)$", node.module))
    return found


def upward(sources: dict[str, str], order: list[str]) -> list[str]:
    """Imports of files that come later in the order."""
    place = {name: i for i, name in enumerate(order)}
    return [
        f"{name} imports {other}"
        for name, source in sources.items()
        for other in sorted(imports(source))
        if place[other] >= place[name]
    ]


def sources() -> dict[str, str]:
    return {f.stem: f.read_text() for f in ROOM.glob("*.py") if f.stem != "__init__"}


def test_the_page_names_every_file_once():
    order = order_on_the_page()
    assert sorted(order) == sorted(sources())


def test_files_import_only_from_files_before_them():
    assert upward(sources(), order_on_the_page()) == []


def test_a_planted_circle_is_seen():
    planted = {"a": "from quadriga.protocol import b", "b": ""}
    planted["b"] = "def f():\n    from quadriga.protocol.a import g\n"
    assert upward(planted, ["a", "b"]) == ["a imports b"]
    assert upward(planted, ["b", "a"]) == ["b imports a"]
