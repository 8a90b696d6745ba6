"""The project's Python files as syntax trees, for checks that read the code without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "quadriga"
PYTHON_FOLDERS = ("src", "tests", "benchmarks", "examples")


@dataclass(frozen=True)
class SourceFile:
    """One Python file. `name` is its path relative to the root of the project."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.name)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def is_package(self) -> bool:
        return self.name.endswith("/__init__.py")

    @property
    def folder(self) -> str:
        return self.name.rpartition("/")[0]


@dataclass(frozen=True)
class Import:
    """One imported module, or one name imported from a module.

    `import a.b` has module "a.b" and name None; `from a.b import c` has module "a.b" and name "c".
    `module` is absolute. `types_only` is true under `if TYPE_CHECKING:`.
    """

    line: int
    module: str
    name: str | None = None
    types_only: bool = False


@cache
def read(path: Path) -> SourceFile:
    return SourceFile(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))


def package_files() -> list[SourceFile]:
    return [read(path) for path in sorted(PACKAGE.rglob("*.py"))]


def all_python_files() -> list[SourceFile]:
    paths = (p for folder in PYTHON_FOLDERS for p in (ROOT / folder).rglob("*.py"))
    return [read(path) for path in sorted(paths)]


def module_name(file: SourceFile) -> str:
    """`src/quadriga/config/plan.py` → `quadriga.config.plan`; a package has its folder's name."""
    parts = Path(file.name).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: SourceFile) -> Iterator[Import]:
    """Yield every import of the file, those in functions and under TYPE_CHECKING included.

    `import_module("a.b")`, `__import__("a.b")` and `find_spec("a.b")` count as `import a.b`.
    """
    own = module_name(file)
    yield from _imports_in(file.tree, own if file.is_package else own.rpartition(".")[0], False)


def imports_of(file: SourceFile) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of every import. `from quadriga import config` gives quadriga.config."""
    seen: set[tuple[int, str]] = set()
    for found in imports(file):
        top_level = found.module == "quadriga" and found.name is not None
        entry = found.line, f"quadriga.{found.name}" if top_level else found.module
        if entry not in seen:
            seen.add(entry)
            yield entry


def _imports_in(node: ast.AST, package: str, types_only: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(node.lineno, a.name, None, types_only) for a in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute(node, package)
        yield from (Import(node.lineno, base, a.name, types_only) for a in node.names)
    elif isinstance(node, ast.Call):
        yield from _dynamic_import(node, types_only)
    if isinstance(node, ast.If) and _is_type_checking(node.test):
        for child in node.body:
            yield from _imports_in(child, package, True)
        for child in node.orelse:
            yield from _imports_in(child, package, types_only)
    else:
        for child in ast.iter_child_nodes(node):
            yield from _imports_in(child, package, types_only)


def _is_type_checking(test: ast.expr) -> bool:
    """True for `TYPE_CHECKING` and `typing.TYPE_CHECKING`."""
    return "TYPE_CHECKING" in (getattr(test, "id", ""), getattr(test, "attr", ""))


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """The module of `from ..a import b`, seen from a module of `package`."""
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    above = parts[: len(parts) - node.level + 1]
    return ".".join([*above, node.module] if node.module else above)


def _dynamic_import(node: ast.Call, types_only: bool) -> Iterator[Import]:
    called = (
        node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    )
    if called not in ("import_module", "__import__", "find_spec") or not node.args:
        return
    first = node.args[0]
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        yield Import(node.lineno, first.value, None, types_only)
