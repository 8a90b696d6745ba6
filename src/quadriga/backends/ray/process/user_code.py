"""Code of the user's files that workers cannot import by name: it is sent with what uses it."""

from __future__ import annotations

import importlib.machinery
import os
import sys
import sysconfig
import weakref
from types import ModuleType

from ray import cloudpickle

_INSTALLED = tuple(
    os.path.join(sysconfig.get_path(kind), "")
    for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)
_seen: weakref.WeakSet[ModuleType] = weakref.WeakSet()
_latest: tuple[int, ModuleType | None] = (0, None)
"""At the last look: how many modules there were, and which had been loaded last."""


def send_code_of_loaded_files() -> None:
    """Have functions and classes of modules that were loaded by path pickled by value from now on.

    If the name of a module leads the importers to another file, or to none, the module exists in
    this process only, and a worker could not look up its functions and classes. The function looks
    again whenever modules have been loaded since, and at no module twice.
    """
    global _latest
    modules = sys.modules
    newest = len(modules), modules[next(reversed(modules))]
    if _latest == newest:
        return
    _latest = newest
    roots = {os.path.abspath(path) for path in sys.path}
    for name, module in list(modules.items()):
        if not isinstance(module, ModuleType) or module in _seen:
            continue
        _seen.add(module)
        file = module.__dict__.get("__file__")
        if file and _is_users(name, file) and not _found_by_name(name, file, roots):
            cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]  # untyped


def _is_users(name: str, file: str) -> bool:
    if name in ("__main__", "__mp_main__") or name.partition(".")[0] == "quadriga":
        return False  # cloudpickle pickles what `__main__` defines by value without our help
    return os.path.isabs(file) and file.endswith(".py") and not file.startswith(_INSTALLED)


def _found_by_name(name: str, file: str, roots: set[str]) -> bool:
    stem = file.removesuffix(".py").removesuffix(os.sep + "__init__")
    tail = os.sep + name.replace(".", os.sep)
    if stem.endswith(tail) and stem.removesuffix(tail) in roots:
        return True
    spec = _spec(name)
    return spec is not None and spec.origin == file


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """Return what the importers find for a name, as if it had not been imported yet."""
    parent = name.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", ()) if parent else None
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except (ImportError, AttributeError, ValueError, TypeError):
            continue
        if spec is not None:
            return spec
    return None
