"""One method call: what is sent to a rank, and what its result is joined with.

The last two sections are about the values in it: whether a process needs the modules of tensors for
them, and how a rank gets values that it may write into.
"""

from __future__ import annotations

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar

from quadriga.errors import DispatchError
from quadriga.protocol.containers import PLAIN_TYPES, walk
from quadriga.protocol.threads import PendingValue
from quadriga.single_controller.rank_layout import GroupLayout

T = TypeVar("T")

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
        ...

    @property
    def rank_layout(self) -> GroupLayout:
        """The layout (tp, cp, dp, pp) of each rank."""
        ...

    def dispatch_info(self, mesh_name: str) -> list[int]:
        """Return the index of the part that each rank receives, by rank."""
        ...

    def collect_info(self, mesh_name: str) -> list[bool]:
        """Return whether the result of each rank is collected, by rank."""
        ...


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


# Loading `quadriga.protocol.boundary` loads tensordict, which takes as long as loading torch. A
# process that sends and receives no tensors never loads either of them.

BOUNDARY = "quadriga.protocol.boundary"
_DATA_MODULES = ("torch.", "tensordict.", "numpy.", "quadriga.protocol.")
_PLAIN = frozenset(PLAIN_TYPES)


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


# Private arguments and results


def copied(value: object) -> object:
    """Copy everything in a value that can be written into."""
    return walk(value, _copied_leaf)


def _copied_leaf(value: object) -> object:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.detach().clone()
    return private(value)


def private(value: T) -> T:
    """Return a copy, or the value itself: not every object that can be pickled can be copied."""
    try:
        return copy.deepcopy(value)
    except Exception:  # anything that the user's objects may raise
        return value


def check_timeout(name: str, timeout: object) -> None:
    """Raise `DispatchError` unless the option `name` is None or a positive number of seconds."""
    if timeout is not None and (
        isinstance(timeout, bool)
        or not isinstance(timeout, int | float)
        or not 0 < timeout < float("inf")
    ):
        raise DispatchError(
            f"{name} expects a number of seconds above 0, or None, got {timeout!r}."
        )


def check_timeouts(**timeouts: object) -> None:
    """Raise `DispatchError` for an option of a worker group that is no deadline."""
    for name, timeout in timeouts.items():
        check_timeout(f"{name} of a worker group", timeout)
