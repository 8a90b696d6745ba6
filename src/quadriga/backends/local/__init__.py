"""Ranks in the controller's own process: breakpoints work, nothing is started, no Ray."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.backends.local.backend import LocalBackend as LocalBackend
    from quadriga.backends.local.group import LocalWorkerGroup as LocalWorkerGroup

_HOME = {"LocalBackend": "backend", "LocalWorkerGroup": "group"}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
