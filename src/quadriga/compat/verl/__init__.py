"""Import names for code that was written for verl.

    import quadriga.compat.verl     # before the first import of verl itself
    from verl import DataProto
    from verl.single_controller.base.decorator import Dispatch, register

After the import, the modules in `names.MODULES` provide Quadriga's classes and functions, in this
process and in the worker processes that it starts. An installed verl is neither imported nor
changed; its other modules cannot be imported in such a process. A name is imported when it is first
used.

    controller/   workers, worker groups, modes     core_algos      estimators, KL, value loss
    training/     trainers and entry points         policy_losses   policy losses
    names         the table of verl's modules       metrics         metrics of a batch
    config        verl's configuration objects      tensors         functions on tensors
    functional    small functions                   tensordicts     functions on TensorDicts
                                                    balancing       sequence-length balancing
"""

import importlib
import sys
from collections.abc import Sequence
from dis import opmap
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType

from quadriga.compat.verl.names import MODULES, NAMES, advice
from quadriga.errors import ConfigError, nearest_name
from quadriga.single_controller.environment import preload_in_workers

VERSION = "0.9.1+quadriga"
_IMPORT_FROM = opmap["IMPORT_FROM"]


class AliasModule(ModuleType):
    """A module of verl, whose names are those of the modules that `MODULES` lists for it.

    They are imported when a name is read. A value that is assigned to a name replaces it for the
    functions of its module too, as in a module of verl. It replaces only names of this package: a
    name of Quadriga's own modules is replaced here and not there.
    """

    _replaced: dict[str, object]

    def __init__(self, name: str) -> None:
        super().__init__(name, f"Quadriga's names under {name}. See quadriga.compat.verl.")
        self.__dict__["_replaced"] = {}

    def __getattr__(self, name: str) -> object:
        if name == "__all__":
            return [public for public in dir(self) if not public.startswith("_")]
        if name.startswith("__"):  # libraries ask every loaded module for such names
            raise AttributeError(name)
        found = self._source(name)
        if found is None:
            message = f"{self.__name__!r} has no {name!r} in Quadriga.{self._advice(name)}"
            # In `from module import name`, Python replaces an AttributeError by an ImportError
            # with a message of its own. `hasattr` and `getattr` need the AttributeError.
            if _runs_from_import(sys._getframe(1)):
                raise ImportError(message, name=self.__name__)
            raise AttributeError(message, name=name, obj=self)
        module, attribute = found
        value: object = getattr(module, attribute) if attribute else module
        self.__dict__[name] = value
        return value

    def _advice(self, name: str) -> str:
        near = nearest_name(name, dir(self), least=0.8)
        return f" Did you mean {near}?" if near else advice(f"{self.__name__}.{name}")

    def _source(self, name: str) -> tuple[ModuleType, str] | None:
        """Return the module that has a name, and the name there; "" if it is the module."""
        module, _, attribute = NAMES.get(f"{self.__name__}.{name}", "").partition(":")
        if module:
            return importlib.import_module(module), attribute
        sources = map(importlib.import_module, MODULES[self.__name__])
        return next(((source, name) for source in sources if hasattr(source, name)), None)

    def __setattr__(self, name: str, value: object) -> None:
        found = None if name.startswith("__") else self._source(name)
        if found is not None and found[1] and found[0].__name__.startswith(f"{__name__}."):
            module, attribute = found
            self._replaced.setdefault(name, getattr(module, attribute))
            setattr(module, attribute, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        found = self._source(name) if name in self._replaced else None
        if found is not None:  # the end of `unittest.mock.patch`, for example
            setattr(*found, self._replaced.pop(name))
        super().__delattr__(name)

    def __dir__(self) -> list[str]:
        spelled = (key.rpartition(".") for key in NAMES)
        own = {name for module, _, name in spelled if module == self.__name__}
        sources = map(importlib.import_module, MODULES[self.__name__])
        return sorted(
            {*super().__dir__(), *own, *(name for source in sources for name in dir(source))}
        )

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
    for name in MODULES:
        module = AliasModule(name)
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
            sys.modules[parent].__dict__[child] = sys.modules[name]
    sys.modules["verl"].__dict__["__version__"] = VERSION
    sys.meta_path.append(NotOffered())


install()
preload_in_workers(__name__)
