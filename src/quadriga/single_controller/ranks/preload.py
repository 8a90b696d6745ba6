"""Modules that every worker process imports before it loads its worker classes."""

from __future__ import annotations

import sys

_names: list[str] = []


def preload_in_workers(module_name: str) -> None:
    """Have rank processes that are started from now on import `module_name` first.

    For modules whose import changes what others find: import aliases, plug-ins.
    """
    if module_name not in _names:
        _names.append(module_name)


def preloaded() -> tuple[str, ...]:
    """What worker processes import first, as far as it is loaded here."""
    return tuple(name for name in _names if name in sys.modules)
