"""`@register`: marks a worker method as callable through a group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from quadriga.errors import DispatchError
from quadriga.single_controller.dispatch import builtin_modes
from quadriga.single_controller.dispatch.modes import (
    Dispatch,
    DispatchMode,
    Execute,
    ExecuteMode,
    inline_dispatch_mode,
)

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

RECORD_ATTRIBUTE = "__quadriga_method__"


@dataclass(frozen=True)
class MethodRecord:
    """What `@register` says about a method."""

    name: str
    dispatch_mode: DispatchMode
    execute_mode: ExecuteMode
    blocking: bool
    materialize_futures: bool
    is_coroutine: bool

    @property
    def current_dispatch(self) -> DispatchMode:
        """The mode as it is now: `update_dispatch_mode` reaches methods registered before."""
        mode = self.dispatch_mode
        return Dispatch.get(mode.name, mode)

    @property
    def current_execute(self) -> ExecuteMode:
        """The execute mode as it is now."""
        mode = self.execute_mode
        return Execute.get(mode.name, mode)


def register(
    dispatch_mode: DispatchMode | Mapping[str, Any] = builtin_modes.ALL_TO_ALL,
    execute_mode: ExecuteMode = builtin_modes.EXECUTE_ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[FunctionT], FunctionT]:
    """Mark a worker method, plain or `async def`, as callable through a worker group.

    `dispatch_mode`: a member of `Dispatch`, or a dict `{"dispatch_fn", "collect_fn"}`.
    `execute_mode`: a member of `Execute`. `blocking=False`: calls return a future.
    `materialize_futures=False`: the method sees futures among its arguments as futures.

    Raises DispatchError for anything else. The function itself is returned unchanged.
    """
    dispatch = _dispatch_mode(dispatch_mode)
    if not isinstance(execute_mode, ExecuteMode):
        raise DispatchError(f"execute_mode must be a member of Execute, got {execute_mode!r}.")

    def mark(function: FunctionT) -> FunctionT:
        record = MethodRecord(
            name=function.__name__,
            dispatch_mode=dispatch,
            execute_mode=execute_mode,
            blocking=blocking,
            materialize_futures=materialize_futures,
            is_coroutine=inspect.iscoroutinefunction(function),
        )
        setattr(function, RECORD_ATTRIBUTE, record)
        return function

    return mark


def registered_methods(cls: type) -> dict[str, MethodRecord]:
    """The registered methods of a class, inherited ones included, by name.

    A method that is overridden without `@register` keeps the record of the one it overrides.
    """
    records: dict[str, MethodRecord] = {}
    for base in reversed(cls.__mro__):
        for name, member in vars(base).items():
            record = getattr(member, RECORD_ATTRIBUTE, None)
            if isinstance(record, MethodRecord):
                records[name] = record
    return records


def _dispatch_mode(mode: object) -> DispatchMode:
    if isinstance(mode, DispatchMode):
        return mode
    if isinstance(mode, Mapping):
        return inline_dispatch_mode(mode)
    raise DispatchError(
        "dispatch_mode must be a member of Dispatch or a dict with 'dispatch_fn' and "
        f"'collect_fn', got {mode!r}."
    )
