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

import importlib
import re
import sys
from collections.abc import Callable
from typing import Any


def imported(place: str) -> Any:
    """Return the class or function at "module:name", for tables of what is imported when used."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def lazy_names(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return `(__getattr__, __dir__, __all__)` for a package. `package`: its `__name__`.

    `__getattr__` imports the module of a name, stores the value in the package, so that it is
    called once per name, and raises `AttributeError` for a name that no import lists.
    """
    module = sys.modules[package]
    with open(module.__file__ or "", encoding="utf-8") as file:
        source = file.read()
    # A regular expression, because `ast` and `pathlib` take longer to import than the package.
    home = {
        name: found[1]
        for found in re.finditer(r"from (\S+) import (\([^)]*\)|.*)", source)
        for name in re.findall(r"\b(\w+) as \1\b", found[2])
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
