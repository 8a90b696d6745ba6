r"""One call of a method: what is sent to a rank, how batches are split, and how results are joined.

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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from operator import methodcaller
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeAlias, TypedDict, TypeVar

from quadriga.errors import DirectCallError, DispatchError, LengthError, MeshError
from quadriga.protocol.threads import PendingValue
from quadriga.single_controller.rank_layout import GroupLayout

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from quadriga.protocol import DataProto, DataProtoFuture
    from quadriga.protocol.tensordicts import TensorDict, TensorDictBase

    Batch = DataProto | DataProtoFuture | TensorDictBase
    AsFuture = Callable[[object], DataProtoFuture]

T = TypeVar("T")
_PLAIN: frozenset[type] = frozenset((str, bytes, int, float, bool, complex, type(None)))
"""Types of values that hold no data of a batch."""


Arguments = tuple[object, ...]
"""Positional arguments of a method."""
KeywordArguments = dict[str, object]
"""Keyword arguments of a method."""
Split = tuple[tuple[Sequence[object], ...], dict[str, Sequence[object]]]
"""The result of a dispatch function: each argument as a sequence with one entry per rank."""
Collect = Callable[[list[object]], object]
"""Joins the results of the ranks of one call."""
DispatchFn = Callable[..., Split]
CollectFn = Callable[..., object]
Ticket = tuple[str, int]
"""The sender of a call, and the number of the call among those of the sender to this rank."""


class ModeFunctions(TypedDict):
    """The two functions of a dispatch mode, as `@register(dispatch_mode=...)` accepts them."""

    dispatch_fn: DispatchFn
    collect_fn: CollectFn


@dataclass(frozen=True, slots=True)
class StreamStep:
    """One step of a generator method. `stream` identifies the generator in the rank."""

    stream: str
    action: Literal["open", "next", "close"]
    """"open" calls the method and returns the first item, "next" returns the next one."""


@dataclass(frozen=True, slots=True)
class Call:
    """One method call for one rank."""

    role: str
    method: str
    args: Arguments = ()
    kwargs: KeywordArguments = field(default_factory=dict)
    materialize: bool = True
    """Whether the method receives the values of futures among its arguments, or the futures."""
    step: StreamStep | None = None
    """The step of a generator method. Its result is a tuple: (item,), or () at the end."""

    @property
    def label(self) -> str:
        """`"role.method"`, as error messages name the call."""
        return f"{self.role}.{self.method}"

    def __reduce__(self) -> tuple[type[Call], tuple[object, ...]]:
        # A dataclass with slots is pickled attribute by attribute, in Python: 3 µs for each rank.
        return Call, (
            self.role, self.method, self.args, self.kwargs, self.materialize, self.step,
        )  # fmt: skip


class SharedArgument(ABC):
    """Stands in a call for a value that several ranks receive and that is stored only once."""

    @abstractmethod
    def open(self) -> object:
        """Return the value."""


class GroupInfo(Protocol):
    """What a dispatch mode asks a group: its size, its meshes and its rank layout."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def rank_layout(self) -> GroupLayout:
        """The layout (tp, cp, dp, pp) of each rank."""

    def dispatch_info(self, mesh_name: str) -> list[int]:
        """Return the index of the part that each rank receives, by rank."""

    def collect_info(self, mesh_name: str) -> list[bool]:
        """Return whether the result of each rank is collected, by rank."""


class GroupView:
    """The view that one call has of its group: what dispatch and collect functions receive.

    Attributes:
        method: "role.method" of the call, for error messages.
        ranks: The ranks that execute the call, in the order of their results.
        single: Whether the execute mode runs the call on one rank and returns its bare result.
        memo: A dict that belongs to the call. The dispatch function stores in it what the collect
            function needs, such as the number of padding rows or an order to restore.

    Other attributes are read from the group and set on it, and `isinstance(view, WorkerGroup)` is
    true, so that a dispatch function can use the view as the group. A view that was pickled with a
    future has no group; it keeps its memo, its ranks, and the meshes and the rank layout that were
    read before.
    """

    __slots__ = ("_known", "group", "memo", "method", "ranks", "single", "world_size")

    def __init__(
        self, group: GroupInfo, ranks: Sequence[int], method: str, single: bool = False
    ) -> None:
        self.group = group
        self.method = method
        self.ranks = ranks
        self.single = single
        self.world_size = group.world_size
        self.memo: dict[str, object] = {}
        self._known: dict[tuple[str, ...], object] = {}
        """What the group has answered, for a view that is pickled."""

    def _ask(self, *question: str) -> Any:  # as the group's answer
        if question not in self._known:
            name, *arguments = question
            answer = getattr(self.group, name)
            self._known[question] = answer(*arguments) if arguments else answer
        return self._known[question]

    @property
    def rank_layout(self) -> GroupLayout:
        """The tp × cp × dp × pp layout that the workers registered."""
        layout: GroupLayout = self._ask("rank_layout")
        return layout

    def dispatch_info(self, mesh_name: str) -> list[int]:
        """Return the data-parallel rank of each rank of the group in a mesh."""
        ranks: list[int] = self._ask("dispatch_info", mesh_name)
        return ranks

    def collect_info(self, mesh_name: str) -> list[bool]:
        """Return for each rank of the group whether its result is collected in a mesh."""
        collects: list[bool] = self._ask("collect_info", mesh_name)
        return collects

    def __getattr__(self, name: str) -> object:
        # While a view is unpickled its slots are empty, and reading `self.group` would recurse
        # without end.
        if name.startswith("__") or name in GroupView.__slots__:
            raise AttributeError(name)
        return getattr(self.group, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in GroupView.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.group, name, value)

    @property  # type: ignore[misc]  # an attribute of `object`; `isinstance` reads it
    def __class__(self) -> type:
        try:
            return type(self.group)
        except AttributeError:  # a view that was pickled
            return GroupView

    def __reduce__(self) -> tuple[object, ...]:
        return _view_without_group, (
            {name: getattr(self, name) for name in self.__slots__ if name != "group"},
        )


RanksFn = Callable[[GroupView], Sequence[int]]
"""The ranks that execute a call."""


def _view_without_group(state: dict[str, object]) -> GroupView:
    view = GroupView.__new__(GroupView)
    for name, value in state.items():
        setattr(view, name, value)
    return view


@dataclass(frozen=True)
class Collector:
    """Joins the results of one call. Picklable, so that a future can be sent to a worker."""

    collect_fn: Callable[..., object]
    view: GroupView

    def __call__(self, outputs: list[object]) -> object:
        return self.collect_fn(self.view, outputs[0] if self.view.single else outputs)


Pending: TypeAlias = PendingValue
"""The result of one rank, received or not."""


# Values that hold tensors

# Loading `quadriga.protocol.boundary` loads tensordict, which takes as long as loading torch. A
# process that sends and receives no tensors never loads either of them.

BOUNDARY = "quadriga.protocol.boundary"
_DATA_MODULES = ("torch.", "tensordict.", "numpy.", "quadriga.protocol.")


def boundary_for(values: Iterable[object]) -> ModuleType | None:
    """Return `quadriga.protocol.boundary` if it is loaded or one of `values` needs it, else None.

    The module converts the values of a call between the form in which a program uses them and the
    form in which they are sent.
    """
    loaded = sys.modules.get(BOUNDARY)
    if loaded is not None:
        return loaded
    # Without torch in this process no value can hold a tensor.
    if "torch" not in sys.modules or not any(map(_holds_data, values)):
        return None
    from quadriga.protocol import boundary

    return boundary


def unpack_results(outputs: list[object]) -> list[object]:
    """Convert what the ranks sent into the values that the controller's program receives."""
    boundary = boundary_for(outputs)
    if boundary is None:
        return outputs
    return [value if value is None else boundary.unpack_result(value) for value in outputs]


def _holds_data(value: object) -> bool:
    """Whether a value is or contains a tensor, an array, a batch or a future."""
    kind = type(value)
    if kind in _PLAIN:
        return False
    if isinstance(value, dict) and kind is dict:
        return any(map(_holds_data, value.values()))
    if isinstance(value, list | tuple | set) and kind in (list, tuple, set):
        # A list of a million token ids: a set of their types takes 10 ns an item, a walk 100.
        if _PLAIN.issuperset(map(type, value)):
            return False
        return any(map(_holds_data, value))
    # Of a class of the user's, only what it inherits is known here: a subclass of Tensor is data.
    return any(f"{base.__module__}.".startswith(_DATA_MODULES) for base in kind.__mro__)


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
    from quadriga.protocol import DataProto, DataProtoFuture
    from quadriga.protocol.tensordicts import TensorDictBase

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


def _layout_scheme(parts: str, collects: str) -> PartScheme:
    """Return the scheme of two attributes of a `RankLayout`."""
    return PartScheme(partial(_of_ranks, parts), partial(_of_ranks, collects))


def _of_ranks(attribute: str, view: GroupView) -> list[Any]:  # the type of the attribute
    return [getattr(rank, attribute) for rank in view.rank_layout.ranks]


DP = _layout_scheme("dp_rank", "is_first_of_last_stage")
PP_AS_DP = _layout_scheme("pp_as_dp_rank", "is_first")
PP_STAGES = _layout_scheme("pp_rank", "is_first_of_stage")


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
    view: GroupView, args: Arguments, kwargs: KeywordArguments, parts: int, uneven: bool = False
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

        value = add_padding(view.memo, f"{view.method}: {where}", value, parts)
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
        from quadriga.protocol import DataProto, DataProtoFuture
        from quadriga.protocol.tensordicts import TensorDict

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
        remove_padding(view.method, padding, part, output)
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
    """Raise DirectCallError: the method is for a rollout engine that calls its workers itself."""
    raise DirectCallError(
        f"{view.method} is registered with Dispatch.DIRECT_ROLLOUT_METHOD: an engine calls it on "
        "the workers itself (group.workers[rank]); it cannot be called through a group.",
        method=view.method,
    )


def collect_list(view: GroupView, outputs: object) -> object:
    """Return the results as a list with one entry per rank."""
    return outputs


def collect_first(view: GroupView, outputs: object) -> object:
    """Return the result of the one rank that executed the call."""
    return outputs[0] if isinstance(outputs, list) and len(view.ranks) == 1 else outputs


def all_ranks(view: GroupView) -> Sequence[int]:
    """Return every rank."""
    return range(view.world_size)


def first_rank(view: GroupView) -> Sequence[int]:
    """Return rank 0."""
    return (0,)
