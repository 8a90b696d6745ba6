"""The package reads every setting of `quadriga train`."""

import ast
from pathlib import Path

import quadriga
from quadriga.config.convert import leaves
from quadriga.config.schema import TrainConfig

PACKAGE = Path(quadriga.__file__).parent
ONLY_DESCRIBE = ("config", "compat", "cli", "trainer/checks", "trainer/preflight")


def attributes_read(files: list[Path]) -> set[str]:
    """The names of all attributes that are read in these files."""
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}


SCHEMA = PACKAGE / "config" / "schema.py"  # the methods of sections read settings too


MEMORY_CHECK = PACKAGE / "trainer" / "checks" / "memory.py"
OF_MEMORY_CHECK = {"trainer.check_memory", "trainer.device_memory_gb"}
"""These settings say whether and against how much memory the check refuses a run."""


def test_every_setting_has_a_reader():
    """Code that only describes a run is no reader."""
    files = [
        file
        for file in PACKAGE.rglob("*.py")
        if not file.relative_to(PACKAGE).as_posix().startswith(ONLY_DESCRIBE)
    ]
    read = attributes_read([*files, SCHEMA])
    placed = {f"placement.{role}" for role in vars(TrainConfig().placement)}  # by `getattr`
    unread = {key for key, _ in leaves(TrainConfig()) if key.rpartition(".")[2] not in read}
    assert unread <= placed | OF_MEMORY_CHECK
    checked = {f"trainer.{name}" for name in attributes_read([MEMORY_CHECK])}
    assert checked >= OF_MEMORY_CHECK
