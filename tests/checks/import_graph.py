"""The import graph of a package: which module imports which, and a circle in it.

A module imports another one wherever an import statement stands: at the top of the file, inside a
function, or under `if TYPE_CHECKING:`. `from package import name` is an import of

- `package.name`, if that is a module;
- the module that defines `name`, if the package's `__init__` only re-exports it;
- the package's `__init__`, if that defines `name` itself.

A lazy `__init__` (one that defines `__getattr__`) re-exports names that load on first use. Its
imports under TYPE_CHECKING are for editors and are no edges. All other imports of an `__init__` are
edges.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from source_tree import PACKAGE, ROOT, Import, SourceFile, imports, module_name

Graph = Mapping[str, Mapping[str, str]]
"""{module: {imported module: "file:line" of the import}}."""


@dataclass(frozen=True)
class _Module:
    file: SourceFile
    imports: tuple[Import, ...]

    @property
    def is_lazy(self) -> bool:
        """Whether this is an `__init__` that defines `__getattr__`, by `def` or by assignment."""
        top = [getattr(node, "name", "") for node in self.file.tree.body]
        assigned = [
            node.id
            for node in ast.walk(self.file.tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ]
        return self.file.is_package and "__getattr__" in [*top, *assigned]

    @property
    def edges(self) -> list[Import]:
        return [found for found in self.imports if not (found.types_only and self.is_lazy)]


def import_graph(files: Iterable[SourceFile]) -> dict[str, dict[str, str]]:
    """Build the graph of imports between `files`. Imports of other modules are left out."""
    modules = {module_name(file): _Module(file, tuple(imports(file))) for file in files}
    graph: dict[str, dict[str, str]] = {name: {} for name in modules}
    for name, module in modules.items():
        for found in module.edges:
            target = _resolve(found.module, found.name, modules, frozenset())
            if target is not None and target != name:
                graph[name].setdefault(target, f"{module.file.name}:{found.line}")
    return graph


def _resolve(
    module: str, name: str | None, modules: Mapping[str, _Module], visited: frozenset[str]
) -> str | None:
    """The module in which `from module import name` ends, None if it is not one of `modules`."""
    if name is not None and f"{module}.{name}" in modules:
        return f"{module}.{name}"
    if module not in modules:
        return None
    if name is None or module in visited or not modules[module].file.is_package:
        return module
    for found in modules[module].imports:
        if found.name == name:
            return _resolve(found.module, name, modules, visited | {module}) or module
    return module


def folder_edges(files: Iterable[SourceFile]) -> dict[tuple[str, str], list[str]]:
    """Return {(importing folder, imported folder): ["module -> module", …]}.

    Names of folders are relative to the package; "." is its root. The `__init__` of a folder
    belongs to it.
    """
    files = list(files)
    root = PACKAGE.relative_to(ROOT).as_posix()
    folder = {module_name(f): f.folder.removeprefix(root).strip("/") or "." for f in files}
    edges: dict[tuple[str, str], list[str]] = {}
    for module, imported in import_graph(files).items():
        for other in imported:
            if folder[module] != folder[other]:
                pair = folder[module], folder[other]
                edges.setdefault(pair, []).append(f"{module} -> {other}")
    return edges


def circle(graph: Graph) -> list[str]:
    """Modules of which each imports the next one, and the last one the first; [] if none do."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1][:0:-1]  # the first one is also the last one, which imports it
    return []


def describe(graph: Graph, circle: list[str]) -> str:
    """One line per import of a circle."""
    following = [*circle[1:], circle[0]]
    return "\n".join(
        f"{graph[module][target]} {module} imports {target}"
        for module, target in zip(circle, following, strict=True)
    )
