"""Import names for code that was written for verl.

    import quadriga.compat.verl     # before the first import of verl itself
    from verl import DataProto
    from verl.single_controller.base.decorator import Dispatch, register

From then on the modules in `names.MODULES` give Quadriga's classes and functions, in this process
and in the worker processes that it starts. An installed verl is neither imported nor changed; its
other modules are out of reach for the process. Names load when they are first used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from quadriga.compat.verl.names import MODULES
from quadriga.errors import ConfigError
from quadriga.single_controller.ranks.preload import preload_in_workers

VERSION = "0.9.1+quadriga"


class AliasModule(ModuleType):
    """A module whose names live elsewhere: `homes` maps each name to "module:attribute"."""

    def __init__(self, name: str, homes: dict[str, str]) -> None:
        super().__init__(name, f"Quadriga's names under {name}. See quadriga.compat.verl.")
        self._homes = homes
        self.__all__ = [public for public in homes if not public.startswith("_")]

    def __getattr__(self, name: str) -> Any:
        homes: dict[str, str] = self.__dict__.get("_homes", {})
        if name not in homes:
            raise AttributeError(
                f"{self.__name__!r} has no {name!r} in Quadriga. It has: {', '.join(homes)}."
            )
        module, _, attribute = homes[name].partition(":")
        value = getattr(importlib.import_module(module), attribute)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._homes})


def install() -> None:
    """Put the modules in place. Raises ConfigError if verl itself has been imported before."""
    loaded = sys.modules.get("verl")
    if isinstance(loaded, AliasModule):
        return
    if loaded is not None:
        raise ConfigError(
            "verl has been imported already in this process; import quadriga.compat.verl before "
            "it, or leave it out.",
            key="quadriga.compat.verl",
        )
    packages = {name.rpartition(".")[0] for name in MODULES}
    for name, homes in MODULES.items():
        module = AliasModule(name, homes)
        if name in packages or any(other.startswith(f"{name}.") for other in MODULES):
            module.__path__ = []
        sys.modules[name] = module
    for name in MODULES:
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
    sys.modules["verl"].__dict__["__version__"] = VERSION


install()
preload_in_workers(__name__)
