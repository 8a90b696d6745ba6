"""Import names for code that was written for verl.

    import quadriga.compat.verl     # before the first import of verl itself
    from verl import DataProto
    from verl.single_controller.base.decorator import Dispatch, register

After the import, the modules in `names.MODULES` provide Quadriga's classes and functions, in this
process and in the worker processes that it starts. An installed verl is neither imported nor
changed; its other modules cannot be imported in such a process. A name is imported when it is first
used.

    controller/   workers, worker groups, modes     metrics         metrics of a batch
    algorithms/   advantages, losses, stages        device          accelerators
    tensors/      tensors and batches               files           files and tokenizers
    training/     trainers and entry points         functional      small helper functions
    names/        the tables of names               config          reading of settings
                                                    config_classes  verl's classes of settings
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dis import opmap
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType

from quadriga.compat.verl.names import MODULES, advice
from quadriga.errors import ConfigError
from quadriga.single_controller.environment import preload_in_workers

VERSION = "0.9.1+quadriga"
_IMPORT_FROM = opmap["IMPORT_FROM"]


class AliasModule(ModuleType):
    """A module whose names are defined in other modules.

    `sources` maps each name to "module:attribute". The source is imported when the name is read.

    A value that is assigned to a name replaces it for the functions of its module too, as in a
    module of verl. It replaces only names that are defined for verl's programs: a name of
    Quadriga's own modules is replaced here and not there.
    """

    _sources: dict[str, str]
    _replaced: dict[str, object]

    def __init__(self, name: str, sources: dict[str, str]) -> None:
        super().__init__(name, f"Quadriga's names under {name}. See quadriga.compat.verl.")
        self.__dict__["_sources"] = sources
        self.__dict__["_replaced"] = {}
        self.__all__ = [public for public in sources if not public.startswith("_")]

    def __getattr__(self, name: str) -> object:
        sources: dict[str, str] = self.__dict__.get("_sources", {})
        if name not in sources:
            message = (
                f"{self.__name__!r} has no {name!r} in Quadriga.{self._advice(name)} It has: "
                f"{', '.join(self._offered()) or 'no names'}."
            )
            # In `from module import name`, Python replaces an AttributeError by an ImportError
            # with a message of its own. `hasattr` and `getattr` need the AttributeError.
            if _runs_from_import(sys._getframe(1)):
                raise ImportError(message, name=self.__name__)
            raise AttributeError(message, name=name, obj=self)
        module, attribute = self._source(name)
        value: object = getattr(module, attribute)
        self.__dict__[name] = value
        return value

    def _advice(self, name: str) -> str:
        """Return in which module of verl a name is, or what to use in its place."""
        home = next((other for other, names in MODULES.items() if name in names), None)
        if home is not None:
            return f" Import it from {home}."
        return advice(f"{self.__name__}.{name}")

    def _offered(self) -> list[str]:
        """Return the names of this module and of the modules below it."""
        below = f"{self.__name__}."
        children = (name.removeprefix(below) for name in MODULES if name.startswith(below))
        return [*self._sources, *(name for name in children if "." not in name)]

    def _source(self, name: str) -> tuple[ModuleType, str]:
        """Return the module that defines a name, and the name there."""
        module, _, attribute = self._sources[name].partition(":")
        return importlib.import_module(module), attribute

    def __setattr__(self, name: str, value: object) -> None:
        if self.__dict__["_sources"].get(name, "").startswith(f"{__name__}."):
            module, attribute = self._source(name)
            self._replaced.setdefault(name, getattr(module, attribute))
            setattr(module, attribute, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._replaced:  # the end of `unittest.mock.patch`, for example
            module, attribute = self._source(name)
            setattr(module, attribute, self._replaced.pop(name))
        super().__delattr__(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._sources})

    def __reduce__(self) -> tuple[object, ...]:
        return module_named, (self.__name__,)


def _runs_from_import(frame: FrameType) -> bool:
    """Return whether a frame runs the `import name` of `from module import name`."""
    code = frame.f_code.co_code
    return 0 <= frame.f_lasti < len(code) and code[frame.f_lasti] == _IMPORT_FROM


def module_named(name: str) -> ModuleType:
    """Return the module of that name, in a process that has imported this one."""
    return importlib.import_module(name)


class NotOffered(MetaPathFinder):
    """Refuses the modules of verl that Quadriga does not provide, and says what to use."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Raise `ModuleNotFoundError` for a module below `verl`; find no other module."""
        if fullname.startswith("verl.") and isinstance(sys.modules.get("verl"), AliasModule):
            raise ModuleNotFoundError(
                f"Quadriga does not provide the module {fullname!r}.{advice(fullname)} "
                "docs/concepts/migration.md lists what it provides.",
                name=fullname,
            )


def install() -> None:
    """Add the modules to `sys.modules`. Raises `ConfigError` if verl itself is imported already."""
    loaded = sys.modules.get("verl")
    if isinstance(loaded, AliasModule):
        return
    if loaded is not None:
        raise ConfigError(
            "verl is imported already in this process. Import quadriga.compat.verl before the "
            "first import of verl, or do not import it.",
            key="quadriga.compat.verl",
        )
    for name, sources in MODULES.items():
        module = AliasModule(name, sources)
        # A module with a `__path__` is a package: `import verl.utils.device` then looks up
        # `verl.utils` in sys.modules and does not search the disk, and `NotOffered` is asked for
        # modules below one that verl does not have as a package.
        module.__path__ = []
        # `importlib.util.find_spec`, with which libraries look for others, reads it.
        module.__spec__ = ModuleSpec(name, None, origin=__name__, is_package=True)
        sys.modules[name] = module
    # `import a.b` binds only `a`; the attribute `b` of `a` is what `a.b` reads afterwards.
    for name in MODULES:
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])
    sys.modules["verl"].__dict__["__version__"] = VERSION
    sys.meta_path.append(NotOffered())


install()
preload_in_workers(__name__)
