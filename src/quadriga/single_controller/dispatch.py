"""Dispatch modes, execute modes, and the record of a registered method.

The modes that come with the package are in one table each.

A dispatch mode is a pair of functions that receive a group view (`call.GroupView`):

- `dispatch_fn(group, *args, **kwargs) -> (args, kwargs)`. Each returned argument is a list with one
  entry per rank of the group, or with one entry per rank that executes the call.
- `collect_fn(group, outputs) -> value`. `outputs` has one entry per rank that executed the call.

An execute mode selects the ranks that execute a call. `register_dispatch_mode` and
`register_execute_mode` add modes. Added modes are sent to the workers before the worker classes.

The MEGATRON dispatch modes split by the `RankLayout` that the workers registered:

| mode | part of a rank | results from |
|---|---|---|
| MEGATRON_COMPUTE(_PROTO) | dp rank | tp 0, cp 0, last pp of each dp rank |
| MEGATRON_PP_AS_DP(_PROTO) | dp rank · pp size + pp rank | tp 0, cp 0 |
| MEGATRON_PP_ONLY | all ranks receive the same | one per pp stage: tp 0, cp 0, dp 0 |

Example: 8 ranks with tp=2, dp=2, pp=2. tp is innermost and pp outermost, and * marks the ranks
whose results are collected:

                     MEGATRON_COMPUTE        MEGATRON_PP_AS_DP
                     dp 0       dp 1         dp 0       dp 1
    stage 0  ranks   0  1       2  3         0* 1       2* 3
             part    0  0       1  1         0  0       2  2
    stage 1  ranks   4* 5       6* 7         4* 5       6* 7
             part    0  0       1  1         1  1       3  3

MEGATRON_PP_AS_DP joins parts 0, 1, 2, 3, which come from ranks 0, 4, 2, 6: the stages of one model
replica hold adjacent parts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NoReturn, TypeVar

from quadriga.errors import DispatchError, LengthError, UnknownNameError, nearest_name
from quadriga.single_controller.batch_modes import (
    collect_joined,
    dispatch_batches,
    dispatch_function_and_batches,
    join_parts,
    select_parts,
    split_by_part,
)
from quadriga.single_controller.call import (
    Arguments,
    CollectFn,
    DispatchFn,
    GroupView,
    KeywordArguments,
    ModeFunctions,
    RanksFn,
    Split,
)
from quadriga.single_controller.rank_layout import GroupLayout


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


FunctionT = TypeVar("FunctionT", bound=Callable[..., object])
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
            near = nearest_name(name, self._members)
            hint = f" Did you mean {near}?" if near else ""
            raise _UnknownModeError(
                f"{self._title} has no mode {name!r}.{hint} Known: {', '.join(self._members)}. "
                f"Add one with register_{self._title.lower()}_mode({name!r}, ...).",
                name=name,
                known=list(self._members),
                nearest=near,
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


def dp_parts(layout: GroupLayout) -> list[int]:
    """Return the data-parallel rank of each rank."""
    return [rank.dp_rank for rank in layout.ranks]


def dp_collects(layout: GroupLayout) -> list[bool]:
    """Return for each rank whether it is tp 0, cp 0 of the last pipeline stage."""
    last = layout.pp_size - 1
    return [r.tp_rank == 0 and r.cp_rank == 0 and r.pp_rank == last for r in layout.ranks]


def pp_as_dp_parts(layout: GroupLayout) -> list[int]:
    """Return `dp rank · pp size + pp rank` of each rank."""
    return [rank.dp_rank * layout.pp_size + rank.pp_rank for rank in layout.ranks]


def pp_as_dp_collects(layout: GroupLayout) -> list[bool]:
    """Return for each rank whether it is tp 0, cp 0."""
    return [rank.tp_rank == 0 and rank.cp_rank == 0 for rank in layout.ranks]


@dataclass(frozen=True)
class PartScheme:
    """Which part of the arguments each rank receives, and which ranks' results are collected.

    Attributes:
        parts: the number of each rank's part.
        collects: for each rank, whether its result is collected.
    """

    parts: Callable[[GroupLayout], list[int]]
    collects: Callable[[GroupLayout], list[bool]]

    def dispatch_batches(self, view: GroupView, /, *args: object, **kwargs: object) -> Split:
        """Split batches into as many parts as the scheme has."""
        return split_by_part(view, self.parts(view.rank_layout), args, kwargs)

    def collect_batches(self, view: GroupView, outputs: Sequence[object]) -> object:
        """Join one batch per part, in the order of dispatch."""
        layout = view.rank_layout
        return join_parts(view, self.parts(layout), self.collects(layout), outputs)

    def dispatch_lists(self, view: GroupView, /, *args: object, **kwargs: object) -> Split:
        """Take lists with one entry per part."""
        return _lists(view, self.parts(view.rank_layout), args, kwargs)

    def collect_list(self, view: GroupView, outputs: Sequence[object]) -> list[object]:
        """Return one result per part."""
        layout = view.rank_layout
        return _selected(view, self.parts(layout), self.collects(layout), outputs)


DP = PartScheme(dp_parts, dp_collects)
PP_AS_DP = PartScheme(pp_as_dp_parts, pp_as_dp_collects)


def collect_pp_stages(view: GroupView, outputs: Sequence[object]) -> list[object]:
    """Return one result per pipeline stage, first stage first."""
    layout = view.rank_layout
    stages = [rank.pp_rank for rank in layout.ranks]
    first = [r.tp_rank == 0 and r.dp_rank == 0 and r.cp_rank == 0 for r in layout.ranks]
    return _selected(view, stages, first, outputs)


def _selected(
    view: GroupView, parts: list[int], collects: list[bool], outputs: Sequence[object]
) -> list[object]:
    return list(select_parts(view, parts, collects, outputs).values())


def _lists(
    view: GroupView, part_of_rank: list[int], args: Arguments, kwargs: KeywordArguments
) -> Split:
    parts = max(part_of_rank) + 1

    def entries(where: str, value: object) -> list[object]:
        if not isinstance(value, list | tuple):
            raise DispatchError(
                f"{view.method}: {where} must be a list with one entry per part ({parts}), got "
                f"{type(value).__name__}."
            )
        if len(value) != parts:
            raise LengthError(f"{view.method}: {where} has {len(value)} entries for {parts} parts.")
        return [value[part_of_rank[rank]] for rank in view.ranks]

    return (
        tuple(entries(f"argument {i}", a) for i, a in enumerate(args)),
        {name: entries(f"argument {name!r}", a) for name, a in kwargs.items()},
    )


_MEGATRON = (
    DispatchMode("MEGATRON_COMPUTE", DP.dispatch_lists, DP.collect_list),
    DispatchMode("MEGATRON_COMPUTE_PROTO", DP.dispatch_batches, DP.collect_batches),
    DispatchMode("MEGATRON_PP_AS_DP", PP_AS_DP.dispatch_lists, PP_AS_DP.collect_list),
    DispatchMode("MEGATRON_PP_AS_DP_PROTO", PP_AS_DP.dispatch_batches, PP_AS_DP.collect_batches),
    DispatchMode("MEGATRON_PP_ONLY", dispatch_one_to_all, collect_pp_stages),
)


__all__ = ["ALL_TO_ALL", "EXECUTE_ALL", "Dispatch", "Execute"]


def dispatch_lists(view: GroupView, /, *args: object, **kwargs: object) -> Split:
    """Take lists with one entry per rank.

    A call that its execute mode runs on one rank takes the arguments as they are. Raises
    `DispatchError` for an argument that is not a list, `LengthError` for a list of another length.
    """
    if view.single:
        return dispatch_one_to_all(view, *args, **kwargs)
    return (
        tuple(_checked_list(view, f"argument {i}", a) for i, a in enumerate(args)),
        {name: _checked_list(view, f"argument {name!r}", a) for name, a in kwargs.items()},
    )


def _checked_list(view: GroupView, where: str, value: object) -> list[object] | tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise DispatchError(
            f"{view.method}: {where} must be a list with one entry per rank "
            f"({view.world_size}), got {type(value).__name__}."
        )
    if len(value) not in (view.world_size, len(view.ranks)):
        raise LengthError(
            f"{view.method}: {where} has {len(value)} entries for {view.world_size} ranks. "
            "Pass one entry per rank."
        )
    return value


def refuse_direct_call(view: GroupView, /, *args: object, **kwargs: object) -> NoReturn:
    """Raise DispatchError: the method is for a rollout engine that calls its workers itself."""
    raise DispatchError(
        f"{view.method} is registered with Dispatch.DIRECT_ROLLOUT_METHOD: an engine calls it on "
        "the workers itself (group.workers[rank]); it cannot be called through a group."
    )


def collect_list(view: GroupView, outputs: object) -> object:
    """Return the results as a list with one entry per rank."""
    return outputs


def collect_first(view: GroupView, outputs: object) -> object:
    """Return the result of the one rank that executed the call."""
    return outputs[0] if isinstance(outputs, list) and len(view.ranks) == 1 else outputs


# name, split, join
_DISPATCH = (
    DispatchMode("RANK_ZERO", dispatch_one_to_all, collect_first, ranks=rank_zero),
    DispatchMode("ONE_TO_ALL", dispatch_one_to_all, collect_list),
    DispatchMode("ALL_TO_ALL", dispatch_lists, collect_list),
    DispatchMode("DP_COMPUTE", dispatch_lists, collect_list),
    DispatchMode("DP_COMPUTE_PROTO", dispatch_batches, collect_joined),
    DispatchMode("DP_COMPUTE_PROTO_WITH_FUNC", dispatch_function_and_batches, collect_joined),
    DispatchMode("DP_COMPUTE_METRIC", dispatch_batches, collect_list),
    DispatchMode("DIRECT_ROLLOUT_METHOD", refuse_direct_call, refuse_direct_call),
    *_MEGATRON,
)

_EXECUTE = (
    ExecuteMode("ALL", all_ranks),
    ExecuteMode("RANK_ZERO", rank_zero, single=True),
)

for _mode in _DISPATCH:
    Dispatch.add(_mode)
for _execute in _EXECUTE:
    Execute.add(_execute)
Dispatch.seal()
Execute.seal()

ALL_TO_ALL = Dispatch["ALL_TO_ALL"]
EXECUTE_ALL = Execute["ALL"]


RECORD_ATTRIBUTE = "__quadriga_method__"
_MARKED_ATTRIBUTE = "__quadriga_marked__"
"""The attribute of a registered function that is the function itself. A decorator that copies
attributes copies this one too, which shows that its function is another one."""
VERL_ATTRIBUTE = "attrs_3141562937"
"""The attribute under which verl's programs find the modes of a method, as a dict."""


def register(
    dispatch_mode: DispatchMode | ModeFunctions = ALL_TO_ALL,
    execute_mode: ExecuteMode = EXECUTE_ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    reads: Iterable[str] | None = None,
) -> Callable[[FunctionT], FunctionT]:
    """Mark a worker method, synchronous or `async def`, so that a worker group can call it.

    Args:
        dispatch_mode: A member of `Dispatch`, or a dict `{"dispatch_fn": f, "collect_fn": g}`.
        execute_mode: A member of `Execute`.
        blocking: Whether a call waits for its results. If False, a call returns a future.
        materialize_futures: Whether the method receives the values of futures among its
            arguments. If False, it receives the futures.
        reads: The fields that the method reads from the `DataProto`s among its arguments, and
            from futures of them whose results have arrived. Other fields are not sent. A pending
            future, a `TensorDict` and batches in lists and dicts are sent whole. None: all fields
            are sent.

    The function is returned unchanged. Raises `DispatchError` for modes of another type, and for
    `reads` that are not names.
    """
    dispatch = _dispatch_mode(dispatch_mode)
    if not isinstance(execute_mode, ExecuteMode):
        raise DispatchError(f"execute_mode must be a member of Execute, got {execute_mode!r}.")

    names = None if reads is None else _names(reads)

    def mark(function: FunctionT) -> FunctionT:
        record = MethodRecord(
            name=function.__name__,
            dispatch_mode=dispatch,
            execute_mode=execute_mode,
            blocking=blocking,
            materialize_futures=materialize_futures,
            is_coroutine=inspect.iscoroutinefunction(function),
            reads=names,
        )
        setattr(function, RECORD_ATTRIBUTE, record)
        setattr(function, _MARKED_ATTRIBUTE, function)
        as_given = {
            "dispatch_mode": dispatch_mode,
            "execute_mode": execute_mode,
            "blocking": blocking,
        }
        setattr(function, VERL_ATTRIBUTE, as_given)
        return function

    return mark


def registered_methods(cls: type) -> dict[str, MethodRecord]:
    """Return the registered methods of a class by name, inherited ones included.

    A method that is overridden or wrapped without `@register` keeps the record of the other one,
    but receives all fields: it may read others.
    """
    records: dict[str, MethodRecord] = {}
    # From the base classes to `cls`, so that the record of an overriding method replaces that of
    # the overridden one.
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            record = _record(member)
            if record is not None:
                # The function may have another name: a lambda, or what a decorator has returned.
                reads = record.reads if _is_marked(member) else None
                same = record.name == name and reads == record.reads
                records[name] = record if same else replace(record, name=name, reads=reads)
            elif name in records:
                records[name] = replace(records[name], reads=None)
    return records


def _is_marked(member: object) -> bool:
    """Return whether `@register` marked this member. Otherwise it has the record of another one,
    which a decorator has copied."""
    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    return any(getattr(marked, _MARKED_ATTRIBUTE, None) is marked for marked in (member, function))


def _record(member: object) -> MethodRecord | None:
    """Return the record of a member of a class, None if it is not registered."""
    if isinstance(member, classmethod | staticmethod) and not hasattr(member, RECORD_ATTRIBUTE):
        member = member.__func__  # registered before it became a class or static method
    try:
        record = getattr(member, RECORD_ATTRIBUTE, None)
    except Exception:  # any object can be an attribute of a class, and its __getattr__ may raise
        return None
    return record if isinstance(record, MethodRecord) else None


def _names(reads: Iterable[str]) -> frozenset[str]:
    names = None if isinstance(reads, str) else frozenset(reads)
    if names is None or not all(isinstance(name, str) for name in names):
        raise DispatchError(f"reads must be a collection of names of fields, got {reads!r}.")
    return names


def _dispatch_mode(mode: DispatchMode | ModeFunctions) -> DispatchMode:
    if isinstance(mode, DispatchMode):
        return mode
    if not isinstance(mode, Mapping):
        raise DispatchError(
            "dispatch_mode must be a member of Dispatch or a dict with 'dispatch_fn' and "
            f"'collect_fn', got {mode!r}."
        )
    return inline_dispatch_mode(mode)
