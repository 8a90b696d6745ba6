"""Load the public names of a package when they are first used (PEP 562).

`import quadriga` must not import torch, Ray or transformers, and `quadriga.rewards.RewardPool` must
still work. A package therefore lists its public names and the module that defines each of them:

    _HOME = {"RewardManager": "manager", "RewardPool": "pool"}
    __all__ = list(_HOME)

    if TYPE_CHECKING:
        from quadriga.rewards.manager import RewardManager as RewardManager
        from quadriga.rewards.pool import RewardPool as RewardPool
    else:
        __getattr__, __dir__ = lazy_names(__name__, _HOME)

Editors and type checkers read the imports and report a misspelt name. Python calls `__getattr__`
of a module only for a name that the module does not have yet.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def lazy_names(
    package: str, home: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `(__getattr__, __dir__)` for a package.

    Args:
        package: `__name__` of the package.
        home: public name → module that defines it, relative to the package ("manager",
            "backends.ray").

    The returned `__getattr__` imports the module, stores the value in the package, so that it is
    called once per name, and raises `AttributeError` for a name that `home` does not list.
    """

    def load(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(f"{package}.{home[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home})

    return load, names
