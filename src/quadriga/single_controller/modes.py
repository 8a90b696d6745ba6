"""The enumerations of dispatch modes and execute modes, `Dispatch` and `Execute`.

A dispatch mode is a pair of functions that receive the view of a call (`dispatch.GroupView`):

- `dispatch_fn(group, *args, **kwargs) -> (args, kwargs)`. Each returned argument is a list with one
  entry per rank of the group, or with one entry per rank that executes the call.
- `collect_fn(group, outputs) -> value`. `outputs` has one entry per rank that executed the call.

An execute mode selects the ranks that execute a call. `register_dispatch_mode` and
`register_execute_mode` add modes. Added modes are sent to the workers before the worker classes.
The modes of the package are in the tables at the end.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

from quadriga.errors import DispatchError, TakenModeError, UnknownNameError, nearest_name
from quadriga.single_controller.dispatch import (
    DP,
    PP_AS_DP,
    PP_STAGES,
    CollectFn,
    DispatchFn,
    ModeFunctions,
    RanksFn,
    all_ranks,
    collect_first,
    collect_joined,
    collect_list,
    dispatch_batches,
    dispatch_function_and_batches,
    dispatch_lists,
    dispatch_one_to_all,
    first_rank,
    refuse_direct_call,
)


@dataclass(frozen=True, eq=False)
class _Mode:
    """Modes of one class and the same name are equal."""

    name: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"{type(self).__name__.removesuffix('Mode')}.{self.name}"

    @property
    def value(self) -> str:
        """The name, as `enum.Enum` calls it."""
        return self.name


@dataclass(frozen=True, eq=False, repr=False)
class DispatchMode(_Mode):
    """How arguments are split and results are joined."""

    dispatch_fn: DispatchFn
    collect_fn: CollectFn
    ranks: RanksFn | None = None
    """The ranks that execute the call, if the dispatch mode determines them (`RANK_ZERO`)."""


@dataclass(frozen=True, eq=False, repr=False)
class ExecuteMode(_Mode):
    """Which ranks execute a call."""

    ranks: RanksFn
    single: bool = False
    """Whether exactly one rank executes, whose result is returned without a list around it."""


ModeT = TypeVar("ModeT", DispatchMode, ExecuteMode)


@dataclass(frozen=True)
class NotGiven:
    """Stands for a function of a mode that was added by its name alone."""

    advice: str

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise DispatchError."""
        raise DispatchError(
            f"A mode was added by its name alone. Give it what it lacks: {self.advice}."
        )


class ModeRegistry(Generic[ModeT]):
    """An enumeration that can be extended: `Dispatch.NAME`, `Dispatch["NAME"]`, iteration, `in`.

    `isinstance(value, Dispatch)` tests whether a value is a dispatch mode. `by_name` makes a mode
    of a name alone, for `register`.
    """

    def __init__(self, title: str, kind: type[ModeT], by_name: Callable[[str], ModeT]) -> None:
        self.title = title
        self._kind: type[ModeT] = kind
        self._by_name: Callable[[str], ModeT] = by_name
        self.members: dict[str, ModeT] = {}
        """Name → mode. A method is registered with a mode and is called with the mode that has its
        name then: another one after an update."""
        self._builtin: dict[str, ModeT] = {}
        self._adopted: set[str] = set()

    def __getattr__(self, name: str) -> ModeT:
        # pickle and copy look for private names before `members` exists.
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> ModeT:
        try:
            return self.members[name]
        except KeyError:
            near = nearest_name(name, self.members)
            hint = f" Did you mean {near}?" if near else ""
            raise _UnknownModeError(
                f"{self.title} has no mode {name!r}.{hint} Known: {', '.join(self.members)}. "
                f"Add one with register_{self.title.lower()}_mode({name!r}, ...).",
                name=name,
                known=list(self.members),
                nearest=near,
            ) from None

    def check(self, mode: object) -> None:
        """Raise DispatchError unless `mode` is a mode of this kind."""
        if not isinstance(mode, self._kind):
            raise DispatchError(f"A mode must be a member of {self.title}, got {mode!r}.")

    def from_name(self, name: str) -> ModeT | None:
        """Return the mode of that name in any case, None if there is none."""
        return self.members.get(name) or self.members.get(name.upper())

    def names(self) -> list[str]:
        """Return the name of every mode."""
        return list(self.members)

    def values(self) -> list[ModeT]:
        """Return every mode."""
        return list(self.members.values())

    def __iter__(self) -> Iterator[ModeT]:
        return iter(self.values())

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, mode: object) -> bool:
        name = mode if isinstance(mode, str) else getattr(mode, "name", None)
        return name in self.members

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.members]

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, self._kind)

    def __or__(self, other: object) -> tuple[object, object]:
        # For `isinstance(mode, Dispatch | dict)`. `isinstance` accepts a tuple of types.
        return self, other

    def __repr__(self) -> str:
        return f"<{self.title}: {', '.join(self.members)}>"

    def register(self, name: str) -> ModeT:
        """Add a mode by its name alone, in capital letters.

        A call with it fails until it gets its functions. Raises `TakenModeError` if it exists.
        """
        return self.add(self._by_name(name.upper()))

    def add(self, mode: ModeT) -> ModeT:
        """Add a mode. Raises `TakenModeError` if its name is taken.

        A mode that was adopted from another process may be added once more, because the file that
        added it there is imported here too.
        """
        if not mode.name.isidentifier():
            raise DispatchError(f"{self.title} mode names are identifiers, got {mode.name!r}.")
        if mode.name in self.members and mode.name not in self._adopted:
            raise TakenModeError(
                f"{self.title}.{mode.name} exists already. Choose another name, or replace it "
                f"with update_{self.title.lower()}_mode.",
                name=mode.name,
            )
        self._adopted.discard(mode.name)
        self.members[mode.name] = mode
        return mode

    def replace(self, mode: ModeT) -> ModeT:
        """Replace the mode of the same name. Raises `UnknownNameError` if there is none."""
        self[mode.name]  # raises for an unknown name
        self.members[mode.name] = mode
        return mode

    def remove(self, name: str) -> ModeT:
        """Remove a mode that was added at run time, and return it."""
        mode = self.from_name(name) or self[name]  # raises for an unknown name
        if mode.name in self._builtin:
            raise DispatchError(f"{self.title}.{mode.name} is built in and cannot be removed.")
        return self.members.pop(mode.name)

    def seal(self) -> None:
        """Mark every mode that was added before this call as built in."""
        self._builtin = dict(self.members)

    def added(self) -> list[ModeT]:
        """Return the modes that were added or replaced at run time."""
        return [mode for mode in self if self._builtin.get(mode.name) is not mode]

    def adopt(self, modes: Sequence[ModeT]) -> None:
        """Add modes that another process has registered."""
        for mode in modes:
            # A name that this process added itself is not marked: adding it twice is an error.
            if mode.name not in self.members:
                self._adopted.add(mode.name)
            self.members[mode.name] = mode


class _UnknownModeError(UnknownNameError, AttributeError):
    """Is an AttributeError too, so that `hasattr(Dispatch, name)` works."""


def _dispatch_by_name(name: str) -> DispatchMode:
    missing = NotGiven(f"update_dispatch_mode(Dispatch.{name}, dispatch_fn, collect_fn)")
    return DispatchMode(name, missing, missing)


def _execute_by_name(name: str) -> ExecuteMode:
    return ExecuteMode(name, NotGiven(f"update_execute_mode(Execute.{name}, ranks)"))


Dispatch = ModeRegistry("Dispatch", DispatchMode, _dispatch_by_name)
Execute = ModeRegistry("Execute", ExecuteMode, _execute_by_name)


def register_dispatch_mode(
    dispatch_mode_name: str, dispatch_fn: DispatchFn, collect_fn: CollectFn
) -> DispatchMode:
    """Add `Dispatch.<name>`. Raises `TakenModeError` if the name is taken."""
    _check_callable(dispatch_fn=dispatch_fn, collect_fn=collect_fn)
    return Dispatch.add(DispatchMode(dispatch_mode_name, dispatch_fn, collect_fn))


def update_dispatch_mode(
    dispatch_mode: DispatchMode, dispatch_fn: DispatchFn, collect_fn: CollectFn
) -> DispatchMode:
    """Replace the functions of a mode, also for methods that are registered already."""
    _check_callable(dispatch_fn=dispatch_fn, collect_fn=collect_fn)
    Dispatch.check(dispatch_mode)
    return Dispatch.replace(DispatchMode(dispatch_mode.name, dispatch_fn, collect_fn))


def register_execute_mode(name: str, ranks: RanksFn, single: bool = False) -> ExecuteMode:
    """Add `Execute.<name>`. `ranks(group)` returns the executing ranks in the order of results."""
    _check_callable(ranks=ranks)
    return Execute.add(ExecuteMode(name, ranks, single))


def update_execute_mode(mode: ExecuteMode, ranks: RanksFn, single: bool = False) -> ExecuteMode:
    """Replace the ranks of an execute mode, also for methods that are registered already."""
    _check_callable(ranks=ranks)
    Execute.check(mode)
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


_MEGATRON = (
    DispatchMode("MEGATRON_COMPUTE", DP.dispatch_lists, DP.collect_list),
    DispatchMode("MEGATRON_COMPUTE_PROTO", DP.dispatch_batches, DP.collect_batches),
    DispatchMode("MEGATRON_PP_AS_DP", PP_AS_DP.dispatch_lists, PP_AS_DP.collect_list),
    DispatchMode("MEGATRON_PP_AS_DP_PROTO", PP_AS_DP.dispatch_batches, PP_AS_DP.collect_batches),
    DispatchMode("MEGATRON_PP_ONLY", dispatch_one_to_all, PP_STAGES.collect_list),
)

# name, split, join
_DISPATCH = (
    DispatchMode("RANK_ZERO", dispatch_one_to_all, collect_first, ranks=first_rank),
    DispatchMode("ONE_TO_ALL", dispatch_one_to_all, collect_list),
    DispatchMode("ALL_TO_ALL", dispatch_lists, collect_list),
    DispatchMode("DP_COMPUTE", dispatch_lists, collect_list),
    DispatchMode("DP_COMPUTE_PROTO", dispatch_batches, collect_joined),
    DispatchMode("DP_COMPUTE_PROTO_WITH_FUNC", dispatch_function_and_batches, collect_joined),
    DispatchMode("DP_COMPUTE_METRIC", dispatch_batches, collect_list),
    DispatchMode("DIRECT_ROLLOUT_METHOD", refuse_direct_call, refuse_direct_call),
    *_MEGATRON,
)

_EXECUTE = (ExecuteMode("ALL", all_ranks), ExecuteMode("RANK_ZERO", first_rank, single=True))

for _mode in _DISPATCH:
    Dispatch.add(_mode)
for _execute in _EXECUTE:
    Execute.add(_execute)
Dispatch.seal()
Execute.seal()
