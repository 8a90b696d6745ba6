"""A worker's method on its group, `group.update_actor(batch)`, and one call of it.

BoundMethod.__call__          test for broken groups
  start_call                  split the arguments by the dispatch mode
    build_calls               pack each distinct argument once, one Call per part
    RankSet.backend.submit    send
  StartedCall.wait            gather, unpack and join the results

A factory of bound methods can call a function before and after each call (`with_hooks`).

Each rank of a generator method yields items, which the controller receives. It asks each rank for
one item per call, and for the next item before it returns the current one. A rank therefore
computes at most one item ahead, other calls run between the items, and every step has the deadline
and the errors of a call.

    controller   open next      next      next          "close" if it is dropped before the end
    rank             0    1         2         3         items computed
    program                0         1         2        items received
"""

from __future__ import annotations

import copy
import inspect
import types
import uuid
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Generic, Literal, ParamSpec, Protocol, Self, TypeVar

from quadriga.errors import DispatchError, LengthError, QuadrigaError, WorkerDiedError
from quadriga.single_controller.backend import CallBackend, RankSet, broken_groups, raise_if_broken
from quadriga.single_controller.call import (
    Arguments,
    Call,
    CallOptions,
    CallView,
    Collect,
    Collector,
    GroupInfo,
    KeywordArguments,
    Pending,
    Split,
    StreamStep,
    boundary_for,
    check_timeout,
    unpack_results,
)
from quadriga.single_controller.dispatch import DispatchMode, MethodRecord

if TYPE_CHECKING:
    from quadriga.protocol import DataProtoFuture


@dataclass(frozen=True)
class Stream:
    """The generators of one call, one per executing rank. Nothing is sent before the first item."""

    backend: CallBackend
    send: Callable[[Sequence[int], Sequence[Call]], Sequence[Pending]]
    """`send(targets, calls)` sends `calls[i]` to rank `targets[i]`."""
    targets: Sequence[int]
    opening: Sequence[Call]
    """The calls that start the generators and return their first items."""
    collect: Collect
    """Joins item i of every rank."""

    def in_order(self) -> Iterator[object]:
        """Yield the joined items. The generators start with the first of them."""
        waiting = deque([self.send(self.targets, self.opening)])
        count = 0
        try:
            while True:
                waiting.append(self._step("next", self.targets))
                items = self._items(waiting.popleft())
                ended = [rank for rank, item in zip(self.targets, items, strict=True) if not item]
                if len(ended) == len(items):
                    return
                if ended:
                    self._raise_uneven(ended, count)
                count += 1
                yield self.collect([value for (value,) in items])
        finally:  # also if the program drops the iterator
            self._close(self.targets)

    def unordered(self) -> Iterator[tuple[int, object]]:
        """Yield (rank, item) as the items come. The generators start with the first of them."""
        from quadriga.protocol.boundary import DataProtoFuture, as_completed

        waiting: dict[int, Sequence[Pending]] = {}
        try:
            # Inside `try`: if the second rank cannot be called, the first generator is ended.
            for rank, call in zip(self.targets, self.opening, strict=True):
                waiting[rank] = self.send([rank], [call])
            while waiting:
                futures = {DataProtoFuture(pending): rank for rank, pending in waiting.items()}
                rank = futures[next(as_completed(futures))]
                # Taken out and put in again: the rank that was served last is looked at last.
                (item,) = self._items(waiting.pop(rank))
                if item:
                    waiting[rank] = self._step("next", [rank])
                    yield rank, item[0]
        finally:
            self._close(self.targets)

    def _items(self, pendings: Sequence[Pending]) -> list[tuple[object, ...]]:
        """Wait for one step of each rank: a tuple of the item, an empty one at the end."""
        results = unpack_results(self.backend.gather(pendings))
        return [result for result in results if isinstance(result, tuple)]

    def _step(self, action: Literal["next", "close"], targets: Sequence[int]) -> Sequence[Pending]:
        first = self.opening[0]
        assert first.step is not None
        step = replace(first.step, action=action)
        return self.send(targets, [Call(first.role, first.method, step=step)] * len(targets))

    def _close(self, targets: Sequence[int]) -> None:
        """End the generators, without waiting for it."""
        with suppress(QuadrigaError):  # of a group that is broken
            self._step("close", targets)

    def _raise_uneven(self, ended: list[int], count: int) -> None:
        call = self.opening[0]
        raise LengthError(
            f"{call.label}: rank(s) {ended} ended after {count} item(s), other ranks did not. Let "
            f"every rank yield the same number, or use group.{call.method}.stream_unordered(...)."
        )


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Part = tuple[Arguments, KeywordArguments]
"""The arguments of one rank."""


class BoundGroup(Protocol):
    """What a bound method needs of its group."""

    @property
    def _ranks(self) -> RankSet: ...
    def class_of(self, role: str) -> type: ...
    def _role_view(self, role: str) -> GroupInfo: ...
    def _parts_of_call(
        self, view: CallView, mode: DispatchMode, args: Arguments, kwargs: KeywordArguments
    ) -> list[Part]: ...


class BoundMethod(Generic[P, R]):
    """A method of a role, called on all ranks: split, send, run, gather, join.

    `method(batch)` waits for the result unless it is registered with `blocking=False`.
    `method.submit(batch)` returns a future. `method.options(timeout=60)(batch)` has a deadline.

    Args:
        group: The group that has the role, possibly together with other roles.
        role: The role that runs the method.
        record: What `@register` recorded.
    """

    def __init__(self, group: BoundGroup, role: str, record: MethodRecord) -> None:
        self.group = group
        self.role = role
        self.record = record
        self.call_options = CallOptions()
        self.label = f"{role}.{record.name}"
        self.__name__ = record.name
        self.__qualname__ = self.label
        function = getattr(group.class_of(role), record.name)
        self.__doc__ = function.__doc__
        self.is_generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(
            function
        )
        # A function whose code has the method's name: profiles then show a frame of that name.
        self._run = _named(_call, record.name)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self._run(self, args, kwargs)
        return result

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> DataProtoFuture:
        """Start the call and return a future of the joined result."""
        return start_call(self, args, kwargs).future()

    def stream(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[object]:
        """Call a generator method: return an iterator over its items, joined over the ranks.

        Item i is what the dispatch mode makes of item i of every rank. The iterator raises the
        first error of a rank, and LengthError if some ranks have ended and others have not.
        """
        return start_stream(self, args, kwargs).in_order()

    def stream_unordered(self, *args: P.args, **kwargs: P.kwargs) -> Iterator[tuple[int, object]]:
        """Call a generator method: return an iterator over (rank, item), as the items come.

        The items of one rank are in order. Items are not joined: every executing rank contributes,
        and rows that are padding keep their mark.
        """
        return start_stream(self, args, kwargs).unordered()

    def options(self, timeout: float | None = None) -> Self:
        """Return this method with a deadline of `timeout` seconds. None: that of the group.

        Raises `DispatchError` for a timeout that is no positive number.
        """
        check_timeout(f"{self.label}: options(timeout=…)", timeout)
        twin = copy.copy(self)
        twin.call_options = replace(self.call_options, timeout=timeout)
        return twin

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __repr__(self) -> str:
        return f"<{self.label} on {len(self.group._ranks)} ranks>"


def _call(method: BoundMethod[P, R], args: Arguments, kwargs: KeywordArguments) -> object:
    started = start_call(method, args, kwargs)
    return started.wait() if method.record.blocking else started.future()


def _named(function: types.FunctionType | Callable[..., object], name: str) -> types.FunctionType:
    code = function.__code__.replace(co_name=name, co_qualname=name)
    return types.FunctionType(code, function.__globals__, name)


@dataclass(frozen=True)
class StartedCall:
    """A call that was sent to its ranks."""

    ranks: RankSet
    pendings: Sequence[Pending]
    collect: Collect

    def wait(self) -> object:
        """Wait for every rank and join the results. Raises what a worker raised."""
        return self.collect(unpack_results(self.ranks.backend.gather(self.pendings)))

    def future(self) -> DataProtoFuture:
        """Return a `DataProtoFuture` of the joined result."""
        from quadriga.protocol import DataProtoFuture

        return DataProtoFuture(list(self.pendings), self.collect)


def start_call(method: BoundMethod[P, R], args: Arguments, kwargs: KeywordArguments) -> StartedCall:
    """Split the arguments as the method's dispatch mode says and send them to the ranks.

    Raises `DispatchError` for a generator method.
    """
    record, ranks = method.record, method.group._ranks
    if method.is_generator:
        raise DispatchError(
            f"{method.label} is a generator, whose items are received one by one. Call "
            f"group.{record.name}.stream(...) or group.{record.name}.stream_unordered(...)."
        )
    view, parts = _split(method, args, kwargs)
    targets = list(view.ranks)
    calls = build_calls(ranks, targets, method.role, record.name, parts, record.materialize_futures)
    pendings = send_calls(ranks, targets, calls, method.call_options.timeout)
    return StartedCall(ranks, pendings, Collector(record.current_dispatch.collect_fn, view))


def start_stream(method: BoundMethod[P, R], args: Arguments, kwargs: KeywordArguments) -> Stream:
    """Split the arguments of a generator method and return its calls. Nothing is sent yet.

    Raises `DispatchError` for a method that is not a generator.
    """
    record, ranks = method.record, method.group._ranks
    if not method.is_generator:
        raise DispatchError(
            f"{method.label} is not a generator: its method has no yield. Call it directly."
        )
    view, parts = _split(method, args, kwargs)
    step, targets = StreamStep(uuid.uuid4().hex, "open"), list(view.ranks)
    futures = record.materialize_futures
    return Stream(
        ranks.backend,
        partial(send_calls, ranks, timeout=method.call_options.timeout),
        targets,
        build_calls(ranks, targets, method.role, record.name, parts, futures, step),
        Collector(record.current_dispatch.collect_fn, view),
    )


def _split(
    method: BoundMethod[P, R], args: Arguments, kwargs: KeywordArguments
) -> tuple[CallView, list[Part]]:
    """Return the view of a new call and the arguments of each executing rank."""
    dispatch, execute = method.record.current_dispatch, method.record.current_execute
    # Each role of a shared process has its own meshes and rank layout, hence the view of one role.
    view = CallView(method.group._role_view(method.role), (), method.label, execute.single)
    # Modes are functions of the view, so the view exists before it knows the executing ranks.
    view.ranks = (dispatch.ranks or execute.ranks)(view)
    if method.record.reads is not None:
        args, kwargs = _read_fields(method.record, method.record.reads, args, kwargs)
    return view, method.group._parts_of_call(view, dispatch, args, kwargs)


def _read_fields(
    record: MethodRecord, names: Container[str], args: Arguments, kwargs: KeywordArguments
) -> tuple[Arguments, KeywordArguments]:
    """Return the arguments with only these fields in the batches among them."""
    boundary = boundary_for((*args, *kwargs.values()))
    if boundary is None:  # there is no batch among them
        return args, kwargs
    # Without materialize_futures a method receives futures, so none may become its batch.
    keep = partial(boundary.with_fields, names=names, futures=record.materialize_futures)
    return (
        tuple(map(keep, args)),
        {key: keep(value) for key, value in kwargs.items()},
    )


def parts_of_ranks(view: CallView, split: Split) -> list[Part]:
    """Turn one sequence per argument into the arguments of each executing rank.

    Example: `(([a0, a1],), {"k": [k0, k1]})` for two ranks gives `[((a0,), {"k": k0}),
    ((a1,), {"k": k1})]`. Raises `DispatchError` or `LengthError` if the dispatch function returned
    something else.
    """
    try:
        args, kwargs = split
        columns = [*args, *kwargs.values()]
    except (TypeError, ValueError, AttributeError):
        raise DispatchError(
            f"{view.method}: a dispatch function returns (args, kwargs), got {split!r}."
        ) from None
    n = len(view.ranks)
    # A call without arguments has no column from which the number of ranks could be read.
    if not columns:
        return [((), {})] * n
    rows = [_entries(view, column) for column in columns]
    cut = len(args)
    names = list(kwargs)
    return [
        (tuple(r[i] for r in rows[:cut]), {k: r[i] for k, r in zip(names, rows[cut:], strict=True)})
        for i in range(n)
    ]


def _entries(view: CallView, column: object) -> Sequence[object]:
    """Return one entry per executing rank, from one entry per executing rank or per rank."""
    if not isinstance(column, list | tuple):
        raise DispatchError(
            f"{view.method}: a dispatch function returns each argument as a list with one entry "
            f"per rank, got {type(column).__name__}."
        )
    if len(column) == len(view.ranks):
        return column
    if len(column) == view.world_size:
        return [column[rank] for rank in view.ranks]
    raise LengthError(
        f"{view.method}: an argument was split into {len(column)} parts for {len(view.ranks)} "
        f"executing ranks of {view.world_size}."
    )


def build_calls(
    ranks: RankSet,
    targets: Sequence[int],
    role: str,
    method: str,
    parts: Sequence[Part],
    materialize: bool = True,
    step: StreamStep | None = None,
) -> list[Call]:
    """Return one call per part, for the ranks `targets`. Parts of the same objects become one
    `Call` object.

    Example: the parts `(p0,), (p0,), (p1,), (p1,)` of 4 ranks with tp=2 give the calls c0, c0, c1,
    c1. `p0` and `p1` are packed once each, and the backend encodes c0 and c1 once each.
    """
    first_args, first_kwargs = parts[0]
    if not first_args and not first_kwargs:
        return [Call(role, method, step=step)] * len(parts)
    packed = _packed_values(ranks, targets, parts)
    # Identity instead of equality: comparing batches would fetch them. The parts keep every object
    # alive until this function returns, so no id is used twice.
    calls: dict[tuple[int, ...], Call] = {}
    result = []
    for args, kwargs in parts:
        key = (*map(id, args), *map(id, kwargs.values()))
        call = calls.get(key)
        if call is None:
            call = calls[key] = Call(
                role,
                method,
                tuple([packed.get(id(value), value) for value in args]),
                {name: packed.get(id(value), value) for name, value in kwargs.items()},
                materialize,
                step,
            )
        result.append(call)
    return result


_SENT_AS_IT_IS = (bool, int, float, type(None))
"""Small integers are one object in Python; sharing them gains nothing."""


def _packed_values(
    ranks: RankSet, targets: Sequence[int], parts: Sequence[Part]
) -> dict[int, object]:
    """Pack each distinct argument object of a call once. Return id → what is sent for it."""
    uses: dict[int, int] = {}
    values: dict[int, object] = {}
    nodes: dict[int, str] = {}
    for target, (args, kwargs) in zip(targets, parts, strict=True):
        for value in (*args, *kwargs.values()) if kwargs else args:
            if type(value) not in _SENT_AS_IT_IS:
                key = id(value)
                values[key] = value
                uses[key] = uses.get(key, 0) + 1
                nodes.setdefault(key, ranks.handles[target].facts.node_id)
    boundary = boundary_for(values.values())
    packed: Iterable[object] = values.values()
    if boundary is not None:
        # A value of several ranks may go to several nodes, so no other value is stored with it.
        readers = ["" if uses[key] > 1 else nodes[key] for key in values]
        packed = boundary.pack_arguments(values.values(), ranks.backend.store, readers)
    share = ranks.backend.share
    return {
        key: share(sent, value) if uses[key] > 1 else sent
        for (key, value), sent in zip(values.items(), packed, strict=True)
    }


def send_calls(
    ranks: RankSet, targets: Sequence[int], calls: Sequence[Call], timeout: float | None = None
) -> Sequence[Pending]:
    """Send `calls[i]` to rank `targets[i]`. `timeout`: seconds; None: the default of the group.

    Raises `WorkerDiedError` if the group or a watched group is broken, `DispatchError` if an
    argument cannot be pickled.
    """
    if broken_groups:
        raise_if_broken()
    label = calls[0].label
    if ranks.broken:
        raise WorkerDiedError(f"{label} cannot be called: {ranks.broken}", method=label)
    return ranks.backend.submit(ranks, targets, calls, timeout or ranks.timeout)


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
