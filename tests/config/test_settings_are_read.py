"""The package reads every setting of `quadriga train`."""

from __future__ import annotations

import ast
from pathlib import Path

import quadriga
from quadriga.config.convert import leaves
from quadriga.config.schema import TrainConfig

PACKAGE = Path(quadriga.__file__).parent
CHECKS = tuple(f"trainer/checks/{name}.py" for name in ("__init__", "data", "settings"))
ONLY_DESCRIBE = ("config", "compat", "cli", *CHECKS, "trainer/preflight")


def attributes_read() -> set[str]:
    """The names of all attributes that are read in code that does more than describe a run."""
    files = [
        file
        for file in PACKAGE.rglob("*.py")
        if not file.relative_to(PACKAGE).as_posix().startswith(ONLY_DESCRIBE)
    ]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in [*files, SCHEMA]]
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}


SCHEMA = PACKAGE / "config" / "schema.py"  # the methods of sections read settings too


def test_every_setting_has_a_reader():
    read = attributes_read()
    placed = {f"placement.{role}" for role in vars(TrainConfig().placement)}  # by `getattr`
    unread = {key for key, _ in leaves(TrainConfig()) if key.rpartition(".")[2] not in read}
    assert unread <= placed
