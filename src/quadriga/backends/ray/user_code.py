"""Code of users' files that no worker could import by name: it travels with what uses it."""

from __future__ import annotations

import importlib.machinery
import os
import sys
import sysconfig
from typing import Any

from ray import cloudpickle

_INSTALLED = tuple(
    os.path.join(sysconfig.get_path(kind), "")
    for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)
_seen: dict[str, int] = {}
_count = 0


def send_code_of_loaded_files() -> None:
    """From now on pickle by value the functions and classes of modules that were loaded by path.

    A module whose name leads an importer to another file, or to none, exists in this process only:
    a function or class of it would be looked up in vain by a worker. Looks again whenever modules
    have been loaded since, and at no module twice.
    """
    global _count
    if len(sys.modules) == _count:
        return
    roots = {os.path.abspath(path) for path in sys.path}
    for name, module in list(sys.modules.items()):
        if _seen.get(name) == id(module):
            continue
        _seen[name] = id(module)
        file = getattr(module, "__dict__", {}).get("__file__")
        if file and _is_users(name, file) and not _found_by_name(name, file, roots):
            cloudpickle.register_pickle_by_value(module)
    _count = len(sys.modules)


def _is_users(name: str, file: str) -> bool:
    if name in ("__main__", "__mp_main__") or name.partition(".")[0] == "quadriga":
        return False  # cloudpickle sends what is defined in __main__ by value anyway
    return os.path.isabs(file) and file.endswith(".py") and not file.startswith(_INSTALLED)


def _found_by_name(name: str, file: str, roots: set[str]) -> bool:
    stem = file.removesuffix(".py").removesuffix(os.sep + "__init__")
    tail = os.sep + name.replace(".", os.sep)
    if stem.endswith(tail) and stem.removesuffix(tail) in roots:
        return True
    spec = _spec(name)
    return spec is not None and spec.origin == file


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """What the importers say of a name, as if it had not been imported yet."""
    parent = name.rpartition(".")[0]
    path: Any = getattr(sys.modules.get(parent), "__path__", ()) if parent else None
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except (ImportError, AttributeError, ValueError, TypeError):
            continue
        if spec is not None:
            return spec
    return None
