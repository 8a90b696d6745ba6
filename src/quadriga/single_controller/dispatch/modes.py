"""Dispatch and execute modes: two open registries.

A dispatch mode is a pair of functions over a group view (see `call.GroupView`):

- `dispatch_fn(group, *args, **kwargs) -> (args, kwargs)`, where each returned argument is a list
  with one entry per rank of the group (or one per executing rank);
- `collect_fn(group, outputs) -> value`, where `outputs` has one entry per executing rank.

An execute mode says which ranks run. A user's file adds modes with `register_dispatch_mode` and
`register_execute_mode`; what was added travels to the workers before their classes do.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from quadriga.errors import DispatchError, UnknownNameError

DispatchFn = Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
CollectFn = Callable[..., Any]
RanksFn = Callable[[Any], Sequence[int]]


@dataclass(frozen=True, eq=False)
class DispatchMode:
    """How arguments are split and results joined. Two modes of one name are equal."""

    name: str
    dispatch_fn: DispatchFn
    collect_fn: CollectFn
    ranks: RanksFn | None = None
    """Ranks this mode is for, where the mode itself says so (`RANK_ZERO`); None: all."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DispatchMode) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Dispatch.{self.name}"


@dataclass(frozen=True, eq=False)
class ExecuteMode:
    """Which ranks run a call. Two modes of one name are equal."""

    name: str
    ranks: RanksFn
    single: bool = False
    """True: exactly one rank runs, and its result stands alone instead of in a list."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExecuteMode) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Execute.{self.name}"


ModeT = TypeVar("ModeT", DispatchMode, ExecuteMode)


class ModeRegistry(Generic[ModeT]):
    """An enumeration that can grow: `Dispatch.NAME`, `Dispatch["NAME"]`, iteration, `in`."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._members: dict[str, ModeT] = {}
        self._builtin: frozenset[str] = frozenset()
        self._adopted: set[str] = set()

    def __getattr__(self, name: str) -> ModeT:
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
        """The mode of that name, or `default`."""
        return self._members.get(name, default)

    def __iter__(self) -> Iterator[ModeT]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, mode: object) -> bool:
        name = mode if isinstance(mode, str) else getattr(mode, "name", None)
        return name in self._members

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._members]

    def __repr__(self) -> str:
        return f"<{self._title}: {', '.join(self._members)}>"

    def add(self, mode: ModeT) -> ModeT:
        """Add `mode`; raises DispatchError if the name is taken.

        A name that was taken over from another process may be added once: the file that added it
        there is being imported here.
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
        """Replace the mode of that name; raises UnknownNameError if there is none."""
        self[mode.name]
        self._members[mode.name] = mode
        self._builtin -= {mode.name}
        return mode

    def remove(self, name: str) -> None:
        """Remove a mode that was added at run time."""
        if name in self._builtin:
            raise DispatchError(f"{self._title}.{name} is built in and cannot be removed.")
        self[name]
        del self._members[name]

    def seal(self) -> None:
        """Mark everything added so far as built in."""
        self._builtin = frozenset(self._members)

    def added(self) -> list[ModeT]:
        """The modes that were added or replaced at run time."""
        return [mode for name, mode in self._members.items() if name not in self._builtin]

    def adopt(self, modes: Sequence[ModeT]) -> None:
        """Take over modes that another process has added."""
        for mode in modes:
            if mode.name not in self._members:
                self._adopted.add(mode.name)
            self._members[mode.name] = mode
            self._builtin -= {mode.name}


class _UnknownModeError(UnknownNameError, AttributeError):
    """Lets `hasattr(Dispatch, name)` work."""


Dispatch: ModeRegistry[DispatchMode] = ModeRegistry("Dispatch")
Execute: ModeRegistry[ExecuteMode] = ModeRegistry("Execute")


def register_dispatch_mode(
    dispatch_mode_name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn
) -> DispatchMode:
    """Add `Dispatch.<name>`. Raises DispatchError if the name is taken."""
    _check_callable(dispatch_fn=dispatch_fn, collect_fn=collect_fn)
    return Dispatch.add(DispatchMode(dispatch_mode_name, dispatch_fn, collect_fn))


def update_dispatch_mode(
    dispatch_mode: DispatchMode, dispatch_fn: DispatchFn, collect_fn: CollectFn
) -> DispatchMode:
    """Replace the functions of a mode, for methods registered before and after."""
    _check_callable(dispatch_fn=dispatch_fn, collect_fn=collect_fn)
    return Dispatch.replace(DispatchMode(dispatch_mode.name, dispatch_fn, collect_fn))


def register_execute_mode(name: str, ranks: RanksFn, single: bool = False) -> ExecuteMode:
    """Add `Execute.<name>`. `ranks(group)` gives the ranks that run, in the order of results."""
    _check_callable(ranks=ranks)
    return Execute.add(ExecuteMode(name, ranks, single))


def update_execute_mode(mode: ExecuteMode, ranks: RanksFn, single: bool = False) -> ExecuteMode:
    """Replace what an execute mode does."""
    _check_callable(ranks=ranks)
    return Execute.replace(ExecuteMode(mode.name, ranks, single))


def inline_dispatch_mode(functions: Mapping[str, Any]) -> DispatchMode:
    """A mode from `{"dispatch_fn": f, "collect_fn": g}`, given to `@register` directly."""
    if set(functions) != {"dispatch_fn", "collect_fn"}:
        raise DispatchError(
            "An inline dispatch mode is a dict with exactly the keys 'dispatch_fn' and "
            f"'collect_fn', got {sorted(map(str, functions))}."
        )
    _check_callable(**functions)
    return DispatchMode("<inline>", functions["dispatch_fn"], functions["collect_fn"])


def get_predefined_dispatch_fn(dispatch_mode: DispatchMode) -> dict[str, Callable[..., Any]]:
    """The two functions of a mode, as `{"dispatch_fn", "collect_fn"}`."""
    mode = Dispatch[dispatch_mode.name]
    return {"dispatch_fn": mode.dispatch_fn, "collect_fn": mode.collect_fn}


def _check_callable(**functions: Any) -> None:
    for name, function in functions.items():
        if not callable(function):
            raise DispatchError(f"{name} must be a function, got {type(function).__name__}.")
