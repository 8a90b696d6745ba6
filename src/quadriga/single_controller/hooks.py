"""Bound methods that call a function before and after each call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from quadriga.single_controller.bound_method import BoundGroup, BoundMethod, start_call
from quadriga.single_controller.call import Arguments, Collect, KeywordArguments
from quadriga.single_controller.dispatch.modes import MethodRecord

if TYPE_CHECKING:
    from quadriga.protocol import DataProtoFuture

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

BeforeCall = Callable[[str, Arguments, KeywordArguments], object]
AfterCall = Callable[[str, object], object]


class HookedMethod(BoundMethod[P, R]):
    """A bound method with a function before and a function after each call.

    After a call that was not waited for, `after` runs when its result is first read in this
    process. It does not run for a future that was sent to another process.
    """

    before: BeforeCall | None = None
    after: AfterCall | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not self.record.blocking:
            future: R = self.submit(*args, **kwargs)  # type: ignore[assignment]  # R is the future
            return future
        if self.before is not None:
            self.before(self.label, args, kwargs)
        value = super().__call__(*args, **kwargs)
        if self.after is not None:
            self.after(self.label, value)
        return value

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> DataProtoFuture:
        """Start the call and return a future of the joined result."""
        if self.before is not None:
            self.before(self.label, args, kwargs)
        started = start_call(self, args, kwargs)
        observed = _ObservedCollect(started.collect, self.label, self.after)
        return replace(started, collect=observed).future()


class _ObservedCollect:
    """Joins as `inner` does and calls the hook once. Pickled, it is `inner` alone."""

    def __init__(self, inner: Collect, label: str, after: AfterCall | None) -> None:
        self.inner, self.label, self.after = inner, label, after

    def __call__(self, outputs: list[object]) -> object:
        value = self.inner(outputs)
        after, self.after = self.after, None
        if after is not None:
            after(self.label, value)
        return value

    def __reduce__(self) -> tuple[Callable[[Collect], Collect], tuple[Collect]]:
        return _itself, (self.inner,)


def _itself(value: T) -> T:
    return value


def with_hooks(
    before: BeforeCall | None = None, after: AfterCall | None = None
) -> Callable[[BoundGroup, str, MethodRecord], HookedMethod[..., object]]:
    """Return a `method_factory` for groups.

    `before(label, args, kwargs)` runs before each call and `after(label, value)` after it, with
    `label` "role.method". The caller receives what a hook raises.
    """

    def make(group: BoundGroup, role: str, record: MethodRecord) -> HookedMethod[..., object]:
        method: HookedMethod[..., object] = HookedMethod(group, role, record)
        method.before, method.after = before, after
        return method

    return make
