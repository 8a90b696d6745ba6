"""What a call carries, on the way out and on the way back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from quadriga.single_controller.placement.rank_layout import GroupLayout


@dataclass(frozen=True, slots=True)
class Call:
    """One method call for one rank."""

    role: str
    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    materialize: bool = True
    """Futures among the arguments are resolved before the method sees them."""


class SharedArgument(ABC):
    """Stands in a call for a value that several ranks receive and that was sent once."""

    @abstractmethod
    def open(self) -> Any:
        """The value."""


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What a caller may say about one call."""

    timeout: float | None = None
    """Seconds until CallTimeoutError; None: the group's default."""


class GroupView(Protocol):
    """What dispatch and collect functions may know of a group."""

    @property
    def method(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def ranks(self) -> Sequence[int]: ...
    @property
    def memo(self) -> dict[str, Any]: ...
    @property
    def rank_layout(self) -> GroupLayout: ...
    def dispatch_info(self, mesh_name: str) -> list[int]: ...
    def collect_info(self, mesh_name: str) -> list[bool]: ...


class CallView:
    """One call's view of its group: a `GroupView`.

    `method` names the call ("actor.update_actor") for messages. `ranks` are those that execute
    it, in the order of results. `memo` belongs to the call: what the dispatch function leaves
    there, the collect function finds (padding, an order to restore). Other attributes are the
    group's, while the group is here; a view that travelled inside a future has kept its memo and
    its ranks only.
    """

    __slots__ = ("group", "memo", "method", "ranks", "world_size")

    def __init__(self, group: Any, ranks: Sequence[int], method: str) -> None:
        self.group = group
        self.method = method
        self.ranks = ranks
        self.world_size: int = group.world_size
        self.memo: dict[str, Any] = {}

    @property
    def rank_layout(self) -> GroupLayout:
        """The tp × cp × dp × pp layout that the workers registered."""
        layout: GroupLayout = self._remembered("layout", lambda: self.group.rank_layout)
        return layout

    def dispatch_info(self, mesh_name: str) -> list[int]:
        """For each rank of the group, its data-parallel rank in that mesh."""
        info: list[int] = self._remembered(
            f"dispatch:{mesh_name}", lambda: self.group.dispatch_info(mesh_name)
        )
        return info

    def collect_info(self, mesh_name: str) -> list[bool]:
        """For each rank of the group, whether its result is collected."""
        info: list[bool] = self._remembered(
            f"collect:{mesh_name}", lambda: self.group.collect_info(mesh_name)
        )
        return info

    def _remembered(self, key: str, ask: Callable[[], Any]) -> Any:
        """Kept in the memo, so that a future that travels can still be joined."""
        if key not in self.memo:
            self.memo[key] = ask()
        return self.memo[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in CallView.__slots__:
            raise AttributeError(name)
        return getattr(self.group, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_view, (self.method, self.world_size, tuple(self.ranks), self.memo)


def _restore_view(
    method: str, world_size: int, ranks: tuple[int, ...], memo: dict[str, Any]
) -> CallView:
    view = CallView.__new__(CallView)
    view.group, view.method = None, method
    view.world_size, view.ranks, view.memo = world_size, ranks, memo
    return view


@dataclass(frozen=True)
class Collector:
    """Joins the outputs of one call; picklable, so that a future can travel."""

    collect_fn: Any
    view: CallView
    single: bool = False

    def __call__(self, outputs: list[Any]) -> Any:
        return self.collect_fn(self.view, outputs[0] if self.single else outputs)


@runtime_checkable
class Pending(Protocol):
    """One rank's answer that may still be on its way; picklable."""

    def result(self) -> Any:
        """Wait for the value; raises what the worker raised."""
        ...
