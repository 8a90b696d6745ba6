"""Dispatch modes, execute modes, and the record of a registered method.

A dispatch mode is a pair of functions that receive a group view (`call.GroupView`):

- `dispatch_fn(group, *args, **kwargs) -> (args, kwargs)`. Each returned argument is a list with one
  entry per rank of the group, or with one entry per rank that executes the call.
- `collect_fn(group, outputs) -> value`. `outputs` has one entry per rank that executed the call.

An execute mode selects the ranks that execute a call. `register_dispatch_mode` and
`register_execute_mode` add modes. Added modes are sent to the workers before the worker classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, TypedDict, TypeVar

from quadriga.errors import DispatchError, UnknownNameError
from quadriga.single_controller.call import GroupView, Split

DispatchFn = Callable[..., Split]
CollectFn = Callable[..., object]
RanksFn = Callable[[GroupView], Sequence[int]]


class ModeFunctions(TypedDict):
    """The two functions of a dispatch mode, as `@register(dispatch_mode=...)` accepts them."""

    dispatch_fn: DispatchFn
    collect_fn: CollectFn


def dispatch_one_to_all(view: GroupView, /, *args: object, **kwargs: object) -> Split:
    """Send the same arguments to every rank."""
    n = len(view.ranks)
    return tuple([a] * n for a in args), {name: [a] * n for name, a in kwargs.items()}


def all_ranks(view: GroupView) -> range:
    """Return every rank of the group."""
    return range(view.world_size)


def rank_zero(view: GroupView) -> tuple[int]:
    """Return rank 0."""
    return (0,)


@dataclass(frozen=True, eq=False)
class DispatchMode:
    """How arguments are split and results are joined. Modes of the same name are equal."""

    name: str
    dispatch_fn: DispatchFn
    collect_fn: CollectFn
    ranks: RanksFn | None = None
    """The ranks that execute the call, if the dispatch mode determines them (`RANK_ZERO`)."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DispatchMode) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Dispatch.{self.name}"

    @property
    def value(self) -> str:
        """The name, as `enum.Enum` calls it."""
        return self.name


@dataclass(frozen=True, eq=False)
class ExecuteMode:
    """Which ranks execute a call. Modes of the same name are equal."""

    name: str
    ranks: RanksFn
    single: bool = False
    """Whether exactly one rank executes, whose result is returned without a list around it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExecuteMode) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Execute.{self.name}"

    @property
    def value(self) -> str:
        """The name, as `enum.Enum` calls it."""
        return self.name


ModeT = TypeVar("ModeT", DispatchMode, ExecuteMode)


@dataclass(frozen=True)
class NotGiven:
    """Stands for a function of a mode that was added by its name alone."""

    mode: str
    advice: str

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise DispatchError."""
        raise DispatchError(f"{self.mode} was added by its name alone. {self.advice}")


class ModeRegistry(Generic[ModeT]):
    """An enumeration that can be extended: `Dispatch.NAME`, `Dispatch["NAME"]`, iteration, `in`.

    `isinstance(value, Dispatch)` tests whether a value is a dispatch mode.

    Args:
        title: the name of the enumeration.
        kind: the class of its modes.
        by_name: makes a mode of a name alone, for `register`.
    """

    def __init__(self, title: str, kind: type[ModeT], by_name: Callable[[str], ModeT]) -> None:
        self._title = title
        self._kind: type[ModeT] = kind
        self._by_name: Callable[[str], ModeT] = by_name
        self._members: dict[str, ModeT] = {}
        self._builtin: frozenset[str] = frozenset()
        self._adopted: set[str] = set()

    def __getattr__(self, name: str) -> ModeT:
        # pickle and copy look for private names before `_members` exists.
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> ModeT:
        try:
            return self._members[name]
        except KeyError:
            near = difflib.get_close_matches(name, self._members, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise _UnknownModeError(
                f"{self._title} has no mode {name!r}.{hint} Known: {', '.join(self._members)}. "
                f"Add one with register_{self._title.lower()}_mode({name!r}, ...).",
                name=name,
                known=list(self._members),
                nearest=near[0] if near else None,
            ) from None

    def get(self, name: str, default: ModeT) -> ModeT:
        """Return the mode of that name, or `default`."""
        return self._members.get(name, default)

    def from_name(self, name: str) -> ModeT | None:
        """Return the mode of that name in any case, None if there is none."""
        return self._members.get(name) or self._members.get(name.upper())

    def names(self) -> list[str]:
        """Return the name of every mode."""
        return list(self._members)

    def values(self) -> list[ModeT]:
        """Return every mode."""
        return list(self._members.values())

    def __iter__(self) -> Iterator[ModeT]:
        return iter(self.values())

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, mode: object) -> bool:
        name = mode if isinstance(mode, str) else getattr(mode, "name", None)
        return name in self._members

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._members]

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, self._kind)

    def __or__(self, other: object) -> tuple[object, object]:
        # For `isinstance(mode, Dispatch | dict)`. `isinstance` accepts a tuple of types.
        return self, other

    def __repr__(self) -> str:
        return f"<{self._title}: {', '.join(self._members)}>"

    def register(self, name: str) -> ModeT:
        """Add a mode by its name alone, in capital letters.

        A call with it fails until it gets its functions. Raises `DispatchError` if it exists.
        """
        return self.add(self._by_name(name.upper()))

    def add(self, mode: ModeT) -> ModeT:
        """Add a mode. Raises `DispatchError` if its name is taken.

        A mode that was adopted from another process may be added once more, because the file that
        added it there is imported here too.
        """
        if not mode.name.isidentifier():
            raise DispatchError(f"{self._title} mode names are identifiers, got {mode.name!r}.")
        if mode.name in self._members and mode.name not in self._adopted:
            raise DispatchError(
                f"{self._title}.{mode.name} exists already. Choose another name, or replace it "
                f"with update_{self._title.lower()}_mode."
            )
        self._adopted.discard(mode.name)
        self._members[mode.name] = mode
        return mode

    def replace(self, mode: ModeT) -> ModeT:
        """Replace the mode of the same name. Raises `UnknownNameError` if there is none."""
        self[mode.name]  # raises for an unknown name
        self._members[mode.name] = mode
        self._builtin -= {mode.name}
        return mode

    def remove(self, name: str) -> ModeT:
        """Remove a mode that was added at run time, and return it."""
        mode = self.from_name(name) or self[name]  # raises for an unknown name
        if mode.name in self._builtin:
            raise DispatchError(f"{self._title}.{mode.name} is built in and cannot be removed.")
        return self._members.pop(mode.name)

    def seal(self) -> None:
        """Mark every mode that was added before this call as built in."""
        self._builtin = frozenset(self._members)

    def added(self) -> list[ModeT]:
        """Return the modes that were added or replaced at run time."""
        return [mode for name, mode in self._members.items() if name not in self._builtin]

    def adopt(self, modes: Sequence[ModeT]) -> None:
        """Add modes that another process has registered."""
        for mode in modes:
            # A name that this process added itself is not marked: adding it twice is an error.
            if mode.name not in self._members:
                self._adopted.add(mode.name)
            self._members[mode.name] = mode
            self._builtin -= {mode.name}


class _UnknownModeError(UnknownNameError, AttributeError):
    """Is an AttributeError too, so that `hasattr(Dispatch, name)` works."""


def _dispatch_by_name(name: str) -> DispatchMode:
    missing = NotGiven(
        f"Dispatch.{name}",
        f"Give it its functions: update_dispatch_mode(Dispatch.{name}, dispatch_fn, collect_fn).",
    )
    return DispatchMode(name, missing, missing)


def _execute_by_name(name: str) -> ExecuteMode:
    missing = NotGiven(
        f"Execute.{name}",
        f"Give it its ranks: update_execute_mode(Execute.{name}, ranks).",
    )
    return ExecuteMode(name, missing)


Dispatch = ModeRegistry("Dispatch", DispatchMode, _dispatch_by_name)
Execute = ModeRegistry("Execute", ExecuteMode, _execute_by_name)


@dataclass(frozen=True)
class MethodRecord:
    """What `@register` records about a method."""

    name: str
    dispatch_mode: DispatchMode
    execute_mode: ExecuteMode
    blocking: bool
    materialize_futures: bool
    is_coroutine: bool
    reads: frozenset[str] | None = None

    @property
    def current_dispatch(self) -> DispatchMode:
        """The dispatch mode after `update_dispatch_mode`, which affects registered methods too."""
        return Dispatch.get(self.dispatch_mode.name, self.dispatch_mode)

    @property
    def current_execute(self) -> ExecuteMode:
        """The execute mode after `update_execute_mode`."""
        return Execute.get(self.execute_mode.name, self.execute_mode)


def register_dispatch_mode(
    dispatch_mode_name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn
) -> DispatchMode:
    """Add `Dispatch.<name>`. Raises `DispatchError` if the name is taken."""
    _check_callable(dispatch_fn=dispatch_fn, collect_fn=collect_fn)
    return Dispatch.add(DispatchMode(dispatch_mode_name, dispatch_fn, collect_fn))


def update_dispatch_mode(
    dispatch_mode: DispatchMode, dispatch_fn: DispatchFn, collect_fn: CollectFn
) -> DispatchMode:
    """Replace the functions of a mode, also for methods that are registered already."""
    _check_callable(dispatch_fn=dispatch_fn, collect_fn=collect_fn)
    if not isinstance(dispatch_mode, DispatchMode):
        raise DispatchError(f"dispatch_mode must be a member of Dispatch, got {dispatch_mode!r}.")
    return Dispatch.replace(DispatchMode(dispatch_mode.name, dispatch_fn, collect_fn))


def register_execute_mode(name: str, ranks: RanksFn, single: bool = False) -> ExecuteMode:
    """Add `Execute.<name>`. `ranks(group)` returns the executing ranks in the order of results."""
    _check_callable(ranks=ranks)
    return Execute.add(ExecuteMode(name, ranks, single))


def update_execute_mode(mode: ExecuteMode, ranks: RanksFn, single: bool = False) -> ExecuteMode:
    """Replace the ranks of an execute mode, also for methods that are registered already."""
    _check_callable(ranks=ranks)
    if not isinstance(mode, ExecuteMode):
        raise DispatchError(f"mode must be a member of Execute, got {mode!r}.")
    return Execute.replace(ExecuteMode(mode.name, ranks, single))


def inline_dispatch_mode(functions: ModeFunctions) -> DispatchMode:
    """Build the mode of a dict `{"dispatch_fn": f, "collect_fn": g}` passed to `@register`."""
    if set(functions) != {"dispatch_fn", "collect_fn"}:
        raise DispatchError(
            "An inline dispatch mode is a dict with exactly the keys 'dispatch_fn' and "
            f"'collect_fn', got {sorted(map(str, functions))}."
        )
    _check_callable(**functions)
    return DispatchMode("<inline>", functions["dispatch_fn"], functions["collect_fn"])


def get_predefined_dispatch_fn(dispatch_mode: DispatchMode) -> ModeFunctions:
    """Return the two functions of a mode as `{"dispatch_fn": f, "collect_fn": g}`."""
    mode = Dispatch[dispatch_mode.name]
    return {"dispatch_fn": mode.dispatch_fn, "collect_fn": mode.collect_fn}


def _check_callable(**functions: object) -> None:
    for name, function in functions.items():
        if not callable(function):
            raise DispatchError(f"{name} must be a function, got {type(function).__name__}.")
