"""`@register` marks a worker method that a worker group can call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from quadriga.errors import DispatchError
from quadriga.single_controller.dispatch import builtin_modes
from quadriga.single_controller.dispatch.modes import (
    DispatchMode,
    ExecuteMode,
    MethodRecord,
    ModeFunctions,
    inline_dispatch_mode,
)

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])

RECORD_ATTRIBUTE = "__quadriga_method__"
_MARKED_ATTRIBUTE = "__quadriga_marked__"
"""The attribute of a registered function that is the function itself. A decorator that copies
attributes copies this one too, which shows that its function is another one."""
VERL_ATTRIBUTE = "attrs_3141562937"
"""The attribute under which verl's programs find the modes of a method, as a dict."""


def register(
    dispatch_mode: DispatchMode | ModeFunctions = builtin_modes.ALL_TO_ALL,
    execute_mode: ExecuteMode = builtin_modes.EXECUTE_ALL,
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
