"""Load the public names of a package when they are first used (PEP 562).

`import quadriga` must not import torch, Ray or transformers, and `quadriga.rewards.RewardPool` must
still work. A package therefore lists its public names in imports that only type checkers run:

    if TYPE_CHECKING:
        from quadriga.rewards.manager import Failure as Failure, RewardManager as RewardManager
        from quadriga.rewards.pool import RewardPool as RewardPool
    else:
        __getattr__, __dir__, __all__ = lazy_names(__name__)

`lazy_names` reads the same imports: `X as X` makes X a public name, for type checkers too (PEP
484). Python calls `__getattr__` of a module only for a name that the module does not have yet.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path


def lazy_names(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `(__getattr__, __dir__, __all__)` for a package. `package`: its `__name__`.

    `__getattr__` imports the module of a name, stores the value in the package, so that it is
    called once per name, and raises `AttributeError` for a name that no import lists.
    """
    module = sys.modules[package]
    tree = ast.parse(Path(module.__file__ or "").read_text(encoding="utf-8"))
    home = {
        alias.name: node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(home[name]), name)
        setattr(module, name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(module), *home})

    return load, names, list(home)
