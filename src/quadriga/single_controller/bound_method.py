"""A worker's method as its group offers it: `group.update_actor(batch)`."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quadriga.single_controller.call import CallOptions
from quadriga.single_controller.dispatch.register import MethodRecord

if TYPE_CHECKING:
    from quadriga.single_controller.worker_group import WorkerGroup


BeforeCall = Callable[[str, tuple[Any, ...], dict[str, Any]], object]
AfterCall = Callable[[str, Any], object]


class BoundMethod:
    """Call it: split, send, run, gather, join. `.submit(...)` does not wait and gives a future.

    `.options(timeout=60)` gives the same method with a deadline of 60 seconds per call.
    """

    def __init__(
        self,
        group: WorkerGroup,
        role: str,
        record: MethodRecord,
        call_options: CallOptions | None = None,
    ) -> None:
        self.group = group
        self.role = role
        self.record = record
        self.call_options = call_options or CallOptions()
        self.label = f"{role}.{record.name}"
        self.__name__ = record.name
        self.__qualname__ = self.label
        self.__doc__ = getattr(group.class_of(role), record.name).__doc__
        # A frame of its own with the method's name, so that profiles show it.
        self._run = _named(_call, record.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self, args, kwargs)

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        """Start the call and return a `DataProtoFuture` at once."""
        return self.group.start_call(self, args, kwargs).future()

    def options(self, timeout: float | None = None) -> BoundMethod:
        """The same method with other call options. `timeout`: seconds, None: the group's."""
        twin = copy.copy(self)
        twin.call_options = replace(self.call_options, timeout=timeout)
        return twin

    def __repr__(self) -> str:
        return f"<{self.label} on {self.group.world_size} ranks>"


class HookedMethod(BoundMethod):
    """A bound method with a function before and one after each call.

    For a call that is not waited for, `after` runs when its result is first read in this process.
    """

    before: BeforeCall | None = None
    after: AfterCall | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.record.blocking:
            return self.submit(*args, **kwargs)
        if self.before is not None:
            self.before(self.label, args, kwargs)
        value = super().__call__(*args, **kwargs)
        if self.after is not None:
            self.after(self.label, value)
        return value

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        """Start the call and return a `DataProtoFuture` at once."""
        if self.before is not None:
            self.before(self.label, args, kwargs)
        started = self.group.start_call(self, args, kwargs)
        observed = _ObservedJoin(started.collector, self.label, self.after)
        return replace(started, collector=observed).future()


class _ObservedJoin:
    """Joins as `inner` does and tells the hook, once. A future that travels leaves it behind."""

    def __init__(self, inner: Any, label: str, after: AfterCall | None) -> None:
        self.inner, self.label, self.after = inner, label, after

    def __call__(self, outputs: list[Any]) -> Any:
        value = self.inner(outputs)
        after, self.after = self.after, None
        if after is not None:
            after(self.label, value)
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.inner,)


def _itself(value: Any) -> Any:
    return value


def with_hooks(
    before: BeforeCall | None = None, after: AfterCall | None = None
) -> Callable[[WorkerGroup, str, MethodRecord], HookedMethod]:
    """A `method_factory` for groups: `before(label, args, kwargs)` runs before each call and
    `after(label, value)` after it; `label` is "role.method". What they raise, the caller sees."""

    def make(group: WorkerGroup, role: str, record: MethodRecord) -> HookedMethod:
        method = HookedMethod(group, role, record)
        method.before, method.after = before, after
        return method

    return make


def _call(method: BoundMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    started = method.group.start_call(method, args, kwargs)
    return started.wait() if method.record.blocking else started.future()


def _named(function: types.FunctionType | Any, name: str) -> Any:
    code = function.__code__.replace(co_name=name, co_qualname=name)
    return types.FunctionType(code, function.__globals__, name)
