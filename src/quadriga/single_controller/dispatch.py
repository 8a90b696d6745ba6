r"""Dispatch modes and execute modes: which rank receives what, and how results are joined.

The modes of the package are in the tables at the end.
A dispatch mode is a pair of functions that receive the view of a call (`call.GroupView`):

- `dispatch_fn(group, *args, **kwargs) -> (args, kwargs)`. Each returned argument is a list with one
  entry per rank of the group, or with one entry per rank that executes the call.
- `collect_fn(group, outputs) -> value`. `outputs` has one entry per rank that executed the call.

An execute mode selects the ranks that execute a call. `register_dispatch_mode` and
`register_execute_mode` add modes. Added modes are sent to the workers before the worker classes.

**Batches** are split by rows, over the ranks of a group or over the data-parallel ranks of a mesh.
Example: 8 ranks with tp=2 (inner) and dp=4, a batch of 8 rows, `dispatch_info` of the mesh
`[0, 0, 1, 1, 2, 2, 3, 3]`, `collect_info` `[T, F, T, F, T, F, T, F]`:

    rows    0 1     2 3     4 5     6 7          4 = max(dispatch_info) + 1 parts
    part     0       1       2       3
            / \     / \     / \     / \         ranks of one part receive the same object,
    rank   0   1   2   3   4   5   6   7         which is sent once
           |       |       |       |             only collecting ranks contribute
    result rows of part 0, 1, 2, 3, joined in this order

A batch is a `DataProto`, a `DataProtoFuture` or a `TensorDict`. This module does not import them
when it loads: a value can only be a batch if `tensordict` is imported already. A reference of a
backend (Ray's `ObjectRef`) is split as the future of its object.

A call in which such a mode finds no batch, but would repeat one, is refused:

f([batch])    a container with a batch, a row, a future or a reference: each rank would get all rows
f(iterator)   the rank that reads it first would get all items
f(None)       every rank would work without data

The MEGATRON modes split by the `RankLayout` that the workers registered, see `rank_layout`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import methodcaller
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar

from quadriga.errors import DispatchError, LengthError, MeshError, UnknownNameError, nearest_name
from quadriga.protocol.containers import PLAIN_TYPES
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
from quadriga.single_controller.rank_layout import (
    GroupLayout,
    dp_collects,
    dp_parts,
    first_of_stages,
    pp_as_dp_collects,
    pp_as_dp_parts,
    pp_stages,
)

if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase
    from typing_extensions import TypeIs

    from quadriga.protocol import DataProto, DataProtoFuture

    Batch = DataProto | DataProtoFuture | TensorDictBase
    AsFuture = Callable[[object], DataProtoFuture]

_PLAIN = frozenset(PLAIN_TYPES)


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


T = TypeVar("T")
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
        self._members: dict[str, ModeT] = {}
        self._builtin: dict[str, ModeT] = {}
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
                f"{self.title} has no mode {name!r}.{hint} Known: {', '.join(self._members)}. "
                f"Add one with register_{self.title.lower()}_mode({name!r}, ...).",
                name=name,
                known=list(self._members),
                nearest=near,
            ) from None

    def current(self, mode: ModeT) -> ModeT:
        """Return the mode that has the name of `mode` now: another one after an update."""
        return self._members.get(mode.name, mode)

    def check(self, mode: object) -> None:
        """Raise DispatchError unless `mode` is a mode of this kind."""
        if not isinstance(mode, self._kind):
            raise DispatchError(f"A mode must be a member of {self.title}, got {mode!r}.")

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
        return f"<{self.title}: {', '.join(self._members)}>"

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
            raise DispatchError(f"{self.title} mode names are identifiers, got {mode.name!r}.")
        if mode.name in self._members and mode.name not in self._adopted:
            raise DispatchError(
                f"{self.title}.{mode.name} exists already. Choose another name, or replace it "
                f"with update_{self.title.lower()}_mode."
            )
        self._adopted.discard(mode.name)
        self._members[mode.name] = mode
        return mode

    def replace(self, mode: ModeT) -> ModeT:
        """Replace the mode of the same name. Raises `UnknownNameError` if there is none."""
        self[mode.name]  # raises for an unknown name
        self._members[mode.name] = mode
        return mode

    def remove(self, name: str) -> ModeT:
        """Remove a mode that was added at run time, and return it."""
        mode = self.from_name(name) or self[name]  # raises for an unknown name
        if mode.name in self._builtin:
            raise DispatchError(f"{self.title}.{mode.name} is built in and cannot be removed.")
        return self._members.pop(mode.name)

    def seal(self) -> None:
        """Mark every mode that was added before this call as built in."""
        self._builtin = dict(self._members)

    def added(self) -> list[ModeT]:
        """Return the modes that were added or replaced at run time."""
        return [mode for mode in self if self._builtin.get(mode.name) is not mode]

    def adopt(self, modes: Sequence[ModeT]) -> None:
        """Add modes that another process has registered."""
        for mode in modes:
            # A name that this process added itself is not marked: adding it twice is an error.
            if mode.name not in self._members:
                self._adopted.add(mode.name)
            self._members[mode.name] = mode


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
    """Add `Dispatch.<name>`. Raises `DispatchError` if the name is taken."""
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


# Batches among the arguments


def each_argument(
    args: Arguments, kwargs: KeywordArguments, function: Callable[[str, object], T]
) -> tuple[tuple[T, ...], dict[str, T]]:
    """Return `function(name of the argument in messages, its value)` of every argument."""
    return (
        tuple([function(f"argument {i}", value) for i, value in enumerate(args)]),
        {name: function(f"argument {name!r}", value) for name, value in kwargs.items()},
    )


def check_unsplit(view: GroupView, args: Arguments, kwargs: KeywordArguments) -> None:
    """Check the arguments of a call, none of which is a batch. Raises `DispatchError`."""
    pairs, named_pairs = each_argument(args, kwargs, lambda where, value: (where, value))
    named = dict([*pairs, *named_pairs.values()])
    got = "None" if all(value is None for value in named.values()) else ""
    for where, value in named.items():
        held, kind = _held_batch(value), type(value).__name__
        if isinstance(value, Iterator):
            got = f"{where} of type {kind}, whose items one rank could read"
        elif held is not None:
            inside = f" of type {kind} with a {type(held).__name__} inside"
            got = where + (", one row of a batch" if held is value else inside)
    if got:
        raise DispatchError(
            f"{view.method}: expected a batch to split (DataProto, DataProtoFuture, TensorDict), "
            f"got {got}. Pass the batch itself, data[0:1] for one row, DataProto.concat of several "
            "batches; or register the method with Dispatch.ONE_TO_ALL: every rank then gets all."
        )


def _held_batch(value: object) -> object:
    """Return the first batch, row of a batch or reference in nested containers, else None."""
    items: Iterator[object]
    if is_split(value) or _is_row(value):  # before its items: a TensorDict is a Mapping
        return value
    if isinstance(value, list | tuple | set | frozenset):
        if _PLAIN.issuperset(map(type, value)):  # a list of token ids, in 10 ns an item
            return None
        items = iter(value)
    elif isinstance(value, Mapping):
        items = iter(value.values())
    else:
        return None
    found = (_held_batch(item) for item in items)
    return next((held for held in found if held is not None), None)


def _is_row(value: object) -> bool:
    contents = sys.modules.get("quadriga.protocol.contents")
    return contents is not None and isinstance(value, contents.DataProtoItem)


_REFERENCES: dict[type, AsFuture] = {}
"""Class of a backend's references → the function that makes a future of one."""


def register_reference(kind: type, as_future: AsFuture) -> None:
    """Make the modes that split batches split the objects to which references of a class refer.

    `as_future(reference)` returns a future, whose parts are the object itself if it is no batch.
    """
    _REFERENCES[kind] = as_future


@cache
def _types() -> tuple[type[DataProto], type[DataProtoFuture], type[TensorDictBase]]:
    from tensordict import TensorDictBase

    from quadriga.protocol import DataProto, DataProtoFuture

    return DataProto, DataProtoFuture, TensorDictBase


def is_batch(value: object) -> TypeIs[Batch]:
    """Return whether a value is a batch, or the future of one."""
    return "tensordict" in sys.modules and isinstance(value, _types())


def is_split(value: object) -> bool:
    """Return whether a dispatch mode that splits batches splits this value."""
    return is_batch(value) or type(value) in _REFERENCES


def dispatch_batches(view: GroupView, /, *args: object, **kwargs: object) -> Split:
    """Split every batch into one part per rank. Every rank receives any other argument whole."""
    return split_arguments(view, args, kwargs, len(view.ranks))


def dispatch_uneven_batches(view: GroupView, /, *args: object, **kwargs: object) -> Split:
    """Split as `dispatch_batches` does, but into parts whose lengths may differ by one."""
    return split_arguments(view, args, kwargs, len(view.ranks), uneven=True)


def dispatch_function_and_batches(
    view: GroupView, function: object, *args: object, **kwargs: object
) -> Split:
    """Send a function to every rank, and split the batches that follow it."""
    if not callable(function):
        raise DispatchError(
            f"{view.method}: the first argument must be a function, got {type(function).__name__}."
        )
    n = len(view.ranks)
    split_args, split_kwargs = split_arguments(view, args, kwargs, n)
    return ([function] * n, *split_args), split_kwargs


def collect_joined(view: GroupView, outputs: object) -> object:
    """Join batches in rank order and remove the padding."""
    return join(view, outputs) if isinstance(outputs, list) else outputs


# The modes of a mesh or a rank layout


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> ModeFunctions:
    """Return the dispatch mode of a mesh, for `@register(dispatch_mode=...)`."""
    scheme = mesh_scheme(mesh_name)
    return {"dispatch_fn": scheme.dispatch_batches, "collect_fn": scheme.collect_batches}


def uneven_dispatch_mode(mesh_name: str | None = None) -> ModeFunctions:
    """Return a dispatch mode that splits any number of rows without padding.

    For `@register(dispatch_mode=...)`, as `DP_COMPUTE_PROTO`, or as the mode of a mesh. 5 rows are
    split into parts of 3 and 2 rows for two ranks, of 2, 1, 1 and 1 for four; with fewer rows than
    parts the last parts are empty. The ranks must not run collectives whose number depends on the
    number of their rows. A batch with padding enabled is padded as in other modes.
    """
    if mesh_name is None:
        return {"dispatch_fn": dispatch_uneven_batches, "collect_fn": collect_joined}
    scheme = mesh_scheme(mesh_name, uneven=True)
    return {"dispatch_fn": scheme.dispatch_batches, "collect_fn": scheme.collect_batches}


def split_by_part(
    view: GroupView,
    part_of_rank: Sequence[int],
    args: Arguments,
    kwargs: KeywordArguments,
    uneven: bool = False,
) -> Split:
    """Split batches into max(part_of_rank) + 1 parts. Rank r receives part `part_of_rank[r]`."""
    if not args and not kwargs:
        return (), {}
    split = split_arguments(view, args, kwargs, max(part_of_rank) + 1, uneven)
    return _for_ranks(view, part_of_rank, split)


def _for_ranks(view: GroupView, part_of_rank: Sequence[int], split: Split) -> Split:
    """Return one entry per executing rank, from one entry per part."""
    # `pieces[part]` is one object for all ranks of a part, which `build_calls` packs once.
    mine = [part_of_rank[rank] for rank in view.ranks]
    return (
        tuple([pieces[part] for part in mine] for pieces in split[0]),
        {name: [pieces[part] for part in mine] for name, pieces in split[1].items()},
    )


@dataclass(frozen=True)
class PartScheme:
    """Which part of the arguments each rank receives, and which ranks' results are collected.

    Attributes:
        parts: the number of each rank's part.
        collects: for each rank of the group, whether its result is collected.
        uneven: the lengths of parts may differ by one.
    """

    parts: Callable[[GroupView], Sequence[int]]
    collects: Callable[[GroupView], Sequence[bool]]
    uneven: bool = False

    def dispatch_batches(self, view: GroupView, /, *args: object, **kwargs: object) -> Split:
        """Split every batch into its parts. Every rank receives any other argument whole."""
        self.collects(view)  # the view must know it before a future with the view is pickled
        return split_by_part(view, self.parts(view), args, kwargs, self.uneven)

    def collect_batches(self, view: GroupView, outputs: object) -> object:
        """Join one batch per part, in the order of the parts."""
        if not isinstance(outputs, list):
            return outputs
        chosen = self.of_parts(view, outputs)
        return join(view, list(chosen.values()), list(chosen))

    def dispatch_lists(self, view: GroupView, /, *args: object, **kwargs: object) -> Split:
        """Take lists with one entry per part."""
        part_of_rank = self.parts(view)
        check = partial(_checked_list, view, "part", (max(part_of_rank) + 1,))
        return _for_ranks(view, part_of_rank, each_argument(args, kwargs, check))

    def collect_list(self, view: GroupView, outputs: Sequence[object]) -> list[object]:
        """Return one result per part."""
        return list(self.of_parts(view, outputs).values())

    def of_parts(self, view: GroupView, outputs: Sequence[object]) -> dict[int, object]:
        """Return the results of the collecting ranks as part → result, in the order of the parts.

        `outputs`: of the executing ranks. Raises `MeshError` if two ranks collect for one part.
        """
        part_of_rank, collects = self.parts(view), self.collects(view)
        chosen: dict[int, object] = {}
        for rank, output in zip(view.ranks, outputs, strict=True):
            if not collects[rank]:
                continue
            part = part_of_rank[rank]
            if part in chosen:
                raise MeshError(
                    f"{view.method}: two ranks collect for data-parallel rank {part}. Exactly one "
                    "of the ranks that share a data-parallel rank may register is_collect=True."
                )
            chosen[part] = output
        return {part: chosen[part] for part in sorted(chosen)}


def mesh_scheme(mesh_name: str, uneven: bool = False) -> PartScheme:
    """Return the scheme of a mesh that the workers have registered."""
    parts = methodcaller("dispatch_info", mesh_name)
    return PartScheme(parts, methodcaller("collect_info", mesh_name), uneven)


def _by_layout(function: Callable[[GroupLayout], T], view: GroupView) -> T:
    return function(view.rank_layout)


DP = PartScheme(partial(_by_layout, dp_parts), partial(_by_layout, dp_collects))
PP_AS_DP = PartScheme(partial(_by_layout, pp_as_dp_parts), partial(_by_layout, pp_as_dp_collects))
PP_STAGES = PartScheme(partial(_by_layout, pp_stages), partial(_by_layout, first_of_stages))


def check_mesh(mesh_name: str, dp_ranks: Sequence[int], collects: Sequence[bool]) -> None:
    """Check what the ranks of a group registered for one mesh.

    Raises `MeshError` unless the data-parallel ranks are 0..n-1 without a gap, each is collected
    from at most one rank, and at least one rank collects.
    """
    expected = set(range(max(dp_ranks) + 1))
    if set(dp_ranks) != expected:
        raise MeshError(
            f"Mesh {mesh_name!r}: data-parallel ranks must cover 0..{max(dp_ranks)}, the workers "
            f"registered {list(dp_ranks)}.",
            mesh_name=mesh_name,
        )
    collected = [dp for dp, is_collect in zip(dp_ranks, collects, strict=True) if is_collect]
    if not collected or len(set(collected)) != len(collected):
        raise MeshError(
            f"Mesh {mesh_name!r}: each data-parallel rank may be collected from one rank, and at "
            f"least one must be; the collecting ranks registered {collected}.",
            mesh_name=mesh_name,
        )


def split_arguments(
    view: GroupView,
    args: Arguments,
    kwargs: KeywordArguments,
    parts: int,
    uneven: bool = False,
) -> Split:
    """Split every batch into `parts` parts of equal length. Repeat any other value.

    A batch with padding enabled is filled with copies of its own rows, which `join` removes (see
    `padding`). Another batch that does not divide is split into parts whose lengths differ by one
    if `uneven` is set. Raises `LengthError` if it is not set, or if two batches of the call need
    different padding, `DispatchError` for the arguments that `check_unsplit` refuses.
    """
    if not args and not kwargs:
        return (), {}
    if not any(map(is_split, args)) and not any(map(is_split, kwargs.values())):
        check_unsplit(view, args, kwargs)
    return each_argument(args, kwargs, partial(_split, view, parts, uneven))


def _split(
    view: GroupView, parts: int, uneven: bool, where: str, argument: object
) -> Sequence[object]:
    as_future = _REFERENCES.get(type(argument))
    value = argument if as_future is None else as_future(argument)
    if not is_batch(value):
        return [value] * parts
    from quadriga.protocol import DataProto, DataProtoFuture
    from quadriga.protocol.boundary import Part

    if isinstance(value, DataProtoFuture):
        arrived = value.arrived()
        # Parts of a received batch are sent as their own rows, parts of a future as the whole
        # future, of which the rank takes its rows.
        if arrived is None or (len(arrived) % parts and not arrived.is_padding_enabled()):
            return value.chunk(parts, uneven)
        value = arrived
    if len(value) % parts and isinstance(value, DataProto) and value.is_padding_enabled():
        from quadriga.single_controller.padding import add_padding

        value = add_padding(view, where, value, parts)
    rows = len(value)
    if rows % parts and uneven:
        return [Part(i, parts, uneven).of(value) for i in range(parts)]
    if rows % parts:
        raise LengthError(
            f"{view.method}: {where} has {rows} rows, which do not divide into {parts} equal "
            f"parts. Pass {rows - rows % parts} or {rows + parts - rows % parts} rows, enable "
            "padding (auto_padding=True), or register the method with uneven_dispatch_mode()."
        )
    if isinstance(value, DataProto):
        return list(value.chunk(parts))
    # A TensorDict of 0 rows cannot be split into pieces of 0 rows.
    return list(value.split(rows // parts)) if rows else [value] * parts


def join(view: GroupView, outputs: Sequence[object], parts: Sequence[int] | None = None) -> object:
    """Join batches in order and remove the padding. Return None if all outputs are None.

    `parts`: the part of which each output is the result; None: 0, 1, 2, …. Raises `DispatchError`
    if the ranks returned anything else, or batches of different classes.
    """
    if all(output is None for output in outputs):
        return None
    if is_batch(outputs[0]):
        from tensordict import TensorDict

        from quadriga.protocol import DataProto, DataProtoFuture

        protos = [output for output in outputs if isinstance(output, DataProto)]
        if len(protos) == len(outputs):
            return DataProto.concat(_without_padding(view, protos, parts))
        tensordicts = [output for output in outputs if isinstance(output, TensorDict)]
        if len(tensordicts) == len(outputs):
            return TensorDict.cat(_without_padding(view, tensordicts, parts), dim=0)
        futures = [output for output in outputs if isinstance(output, DataProtoFuture)]
        if len(futures) == len(outputs):
            return DataProtoFuture.concat(futures)
    kinds = sorted({type(output).__name__ for output in outputs})
    raise DispatchError(
        f"{view.method} must return a batch (DataProto, TensorDict) or None from every rank to be "
        f"joined, got {', '.join(kinds)}. Use Dispatch.DP_COMPUTE_METRIC to get a list of results."
    )


BatchT = TypeVar("BatchT", "DataProto", "TensorDict")


def _without_padding(
    view: GroupView, outputs: list[BatchT], parts: Sequence[int] | None
) -> list[BatchT]:
    padding = view.memo.get("padding")
    if padding is None:
        return outputs
    from quadriga.single_controller.padding import Padding, remove_padding

    if not isinstance(padding, Padding):  # a dispatch function of the user's uses the same key
        return outputs
    return [
        remove_padding(view, padding, part, output)
        for part, output in zip(parts or range(len(outputs)), outputs, strict=True)
    ]


def dispatch_one_to_all(view: GroupView, /, *args: object, **kwargs: object) -> Split:
    """Send the same arguments to every rank."""
    n = len(view.ranks)
    return tuple([a] * n for a in args), {name: [a] * n for name, a in kwargs.items()}


def dispatch_lists(view: GroupView, /, *args: object, **kwargs: object) -> Split:
    """Take lists with one entry per rank.

    A call that its execute mode runs on one rank takes the arguments as they are. Raises
    `DispatchError` for an argument that is not a list, `LengthError` for a list of another length.
    """
    if view.single:
        return dispatch_one_to_all(view, *args, **kwargs)
    lengths = (view.world_size, len(view.ranks))
    return each_argument(args, kwargs, partial(_checked_list, view, "rank", lengths))


def _checked_list(
    view: GroupView, unit: str, lengths: tuple[int, ...], where: str, value: object
) -> list[object] | tuple[object, ...]:
    if not isinstance(value, list | tuple):
        raise DispatchError(
            f"{view.method}: {where} must be a list with one entry per {unit} ({lengths[0]}), got "
            f"{type(value).__name__}."
        )
    if len(value) not in lengths:
        raise LengthError(
            f"{view.method}: {where} has {len(value)} entries for {lengths[0]} {unit}s. Pass one "
            f"entry per {unit}."
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


_MEGATRON = (
    DispatchMode("MEGATRON_COMPUTE", DP.dispatch_lists, DP.collect_list),
    DispatchMode("MEGATRON_COMPUTE_PROTO", DP.dispatch_batches, DP.collect_batches),
    DispatchMode("MEGATRON_PP_AS_DP", PP_AS_DP.dispatch_lists, PP_AS_DP.collect_list),
    DispatchMode("MEGATRON_PP_AS_DP_PROTO", PP_AS_DP.dispatch_batches, PP_AS_DP.collect_batches),
    DispatchMode("MEGATRON_PP_ONLY", dispatch_one_to_all, PP_STAGES.collect_list),
)

# name, split, join
_DISPATCH = (
    DispatchMode("RANK_ZERO", dispatch_one_to_all, collect_first, ranks=lambda view: (0,)),
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
    ExecuteMode("ALL", lambda view: range(view.world_size)),
    ExecuteMode("RANK_ZERO", lambda view: (0,), single=True),
)

for _mode in _DISPATCH:
    Dispatch.add(_mode)
for _execute in _EXECUTE:
    Execute.add(_execute)
Dispatch.seal()
Execute.seal()
