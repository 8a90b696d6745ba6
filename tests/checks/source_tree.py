"""The project's Python files as syntax trees, for checks that read code instead of running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "quadriga"
PYTHON_FOLDERS = ("src", "tests", "benchmarks", "examples")


@dataclass(frozen=True)
class SourceFile:
    """One file. `name` is its path from the project's root."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.name)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())


def read(path: Path) -> SourceFile:
    return SourceFile(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))


def package_files() -> list[SourceFile]:
    return [read(path) for path in sorted(PACKAGE.rglob("*.py"))]


def all_python_files() -> list[SourceFile]:
    paths = (p for folder in PYTHON_FOLDERS for p in (ROOT / folder).rglob("*.py"))
    return [read(path) for path in sorted(paths)]


def module_name(file: SourceFile) -> str:
    """`src/quadriga/config/plan.py` → `quadriga.config.plan`; a package is its folder's name."""
    parts = Path(file.name).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: SourceFile) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, those inside functions and under TYPE_CHECKING too."""
    own = module_name(file)
    package = own if file.name.endswith("__init__.py") else own.rpartition(".")[0]
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, name) for name in _from_import(node, package))
        elif isinstance(node, ast.Call):
            yield from _dynamic_import(node)


def _from_import(node: ast.ImportFrom, package: str) -> list[str]:
    if node.level:
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*above, *([node.module] if node.module else [])])
    else:
        base = node.module or ""
    # `from quadriga import config` names a module by its alias
    return [f"{base}.{alias.name}" for alias in node.names] if base == "quadriga" else [base]


def _dynamic_import(node: ast.Call) -> Iterator[tuple[int, str]]:
    called = (
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    )
    if called not in ("import_module", "__import__", "find_spec") or not node.args:
        return
    first = node.args[0]
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        yield node.lineno, first.value
