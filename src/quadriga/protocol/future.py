"""`DataProtoFuture`: the result of a call that may not have returned yet.

`future.get(timeout=2.0)`, `await future`, `future.done()` and `future.cancel()` work as in
`concurrent.futures` and Ray; `as_completed(futures)` yields futures in the order in which they end.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from tensordict import TensorDict, TensorDictBase

from quadriga.errors import CallTimeoutError, FieldError, LengthError, ProtocolError
from quadriga.protocol.boundary import Deferred, unpack_result
from quadriga.protocol.dataproto import DataProto, DataProtoConfig
from quadriga.protocol.message import Message
from quadriga.protocol.rows import chunk_bounds
from quadriga.protocol.threads import in_thread

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
"""Pauses between two looks at pending values whose class cannot wait for several."""


@runtime_checkable
class PendingValue(Protocol):
    """The result of one rank. Picklable.

    A class of pending values may also have

    - `arrived`: the packed result if this process knows it without waiting, else None;
    - `done() -> bool`: whether the result, or the error instead of it, exists;
    - `all_done(pendings) -> bool`, a static method: whether `wait_all(pendings)` returns or raises
      without waiting for a rank;
    - `cancel() -> bool`: drop the call if it has not started; False if it cannot be dropped;
    - `wait_all(pendings, timeout=None)`, a static method: wait for several at once, so that the
      first failure of any of them ends the wait. Raises `CallTimeoutError` after `timeout` seconds.
    """

    def result(self) -> Any:
        """Wait for the result. Raises the error of the worker."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part `index` of `count` of a batch; `uneven`: lengths may differ by one."""

    index: int
    count: int
    uneven: bool

    def of(self, batch: DataProto | TensorDictBase) -> DataProto | TensorDictBase:
        """Return this part of a batch, as a value of the same type.

        Raises `FieldError` if the value is no batch.
        """
        if not isinstance(batch, DataProto | TensorDictBase):
            raise FieldError(
                "a part of a future is rows of a DataProto or TensorDict, got "
                f"{type(batch).__name__}; use the future itself, which any rank can receive"
            )
        whole = _as_dataproto(batch)
        bounds = chunk_bounds(len(whole), self.count, self.uneven or whole.is_padding_enabled())
        part = whole.slice(bounds[self.index], bounds[self.index + 1])
        return part if isinstance(batch, DataProto) else part.to_tensordict()


class DataProtoFuture(Deferred):
    """A batch that ranks may still be computing.

    `get()` waits and joins; `chunk` and `concat` do not wait. A future, or a part of one, can be an
    argument of any registered method: the receiving worker gets the batch, and only the rows and
    fields that it reads are fetched.
    """

    def __init__(
        self,
        pending: Sequence[PendingValue],
        collect_fn: Callable[[list[Any]], Any] | None = None,
        parts: tuple[Part, ...] = (),
    ) -> None:
        """`pending`: what to wait for, in order. `collect_fn`: joins the results to one batch
        (`DataProto.concat` if None); must be picklable. `parts`: the part of the batch that this
        future is, from the outermost split to the innermost."""
        # A tuple, so that all parts of a future share one: a list each would be n² entries.
        self.pending = tuple(pending)
        self.collect_fn = collect_fn
        self.parts = parts

    def get(self, timeout: float | None = None) -> Any:
        """Wait for all results at once, join them and return this part.

        Raises the first failure of any rank, also while other ranks are still running, and
        `CallTimeoutError` after `timeout` seconds; the call goes on, and `get` may be called again.
        Raises `ProtocolError` for a timeout that is no number of 0 or more.
        """
        self.wait_all([self], timeout)
        return self._joined([pending.result() for pending in self.pending])

    result = get

    def done(self) -> bool:
        """Return whether `get` returns or raises without waiting for a rank.

        On Ray that is the case when all ranks have ended, when one of them has failed, after the
        deadline of the call, and while a watched group is broken.
        """
        kinds = _by_kind(_leaves(self.pending))
        return all(_are_done(kind, pendings) for kind, pendings in kinds.items())

    def cancel(self) -> bool:
        """Drop the results of calls that have not ended.

        On Ray, a rank with coroutine methods ends its call; another rank runs it to the end, now or
        when its turn comes. Returns whether a result was dropped: `get` then raises.
        """
        dropped = list(map(_cancel, _leaves(self.pending)))
        return any(dropped)

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the result in a thread, so that the event loop goes on."""
        return in_thread(self.get).__await__()

    @staticmethod
    def wait_all(values: Sequence[Deferred], timeout: float | None = None) -> None:
        """Wait for the results of several futures at once. Raises the first failure of any, and
        `ProtocolError` for a timeout that is no number of 0 or more."""
        if timeout is not None and (
            isinstance(timeout, bool)
            or not isinstance(timeout, int | float)
            or not 0 <= timeout < math.inf
        ):
            raise ProtocolError(
                f"timeout: expected a number of seconds, 0 or more, or None, got {timeout!r}"
            )
        expires = None if timeout is None else time.monotonic() + timeout
        futures = [future for future in values if isinstance(future, DataProtoFuture)]
        for kind, pendings in _by_kind(_leaves(futures)).items():
            left = None if expires is None else max(0.0, expires - time.monotonic())
            wait_all = getattr(kind, "wait_all", None)
            if wait_all is not None:
                wait_all(pendings, timeout=left)
            elif timeout is not None and expires is not None:
                _poll(pendings, expires, timeout)

    def arrived(self) -> DataProto | None:
        """Return the batch if all ranks have returned it and this process knows that, else None.

        Fetches nothing.
        """
        packed = [getattr(pending, "arrived", None) for pending in self.pending]
        if not all(isinstance(p, Message) and p.kind is not TensorDict for p in packed):
            return None
        joined = self._joined(packed)
        return joined if isinstance(joined, DataProto) else None

    def _joined(self, packed: Sequence[object]) -> Any:
        results = [unpack_result(value) for value in packed]
        joined = _join(results) if self.collect_fn is None else self.collect_fn(results)
        # chunk(2)[1].chunk(3)[0] has parts (1 of 2), (0 of 3): the outermost split comes first.
        for part in self.parts:
            joined = part.of(joined)
        return joined

    def chunk(self, chunks: int, uneven: bool = False) -> list[DataProtoFuture]:
        """Return `chunks` futures, one for each part, without waiting.

        A length that does not divide raises `LengthError` when a part is read, unless `uneven` is
        set or padding is enabled in this process or for the batch.
        """
        if chunks < 1:
            raise LengthError(f"expected at least 1 part to split a batch into, got {chunks}")
        uneven = uneven or DataProtoConfig.auto_padding
        parts = [Part(i, chunks, uneven) for i in range(chunks)]
        return [
            DataProtoFuture(self.pending, self.collect_fn, (*self.parts, part)) for part in parts
        ]

    @property
    def part(self) -> Part:
        """The innermost split: which part this future is of `whole()`."""
        return self.parts[-1] if self.parts else Part(0, 1, uneven=True)

    def whole(self) -> DataProtoFuture:
        """Return the future from which `chunk` made this one; itself if it is no part."""
        whole = copy.copy(self)
        whole.parts = self.parts[:-1]
        return whole

    def split(self, like: Part) -> list[Any]:
        """Wait for the results and return all parts of the split to which `like` belongs.

        A split into one part returns the value itself, which need not be a batch.
        """
        joined = self.get()
        if like.count == 1:
            return [joined]
        return [Part(i, like.count, like.uneven).of(joined) for i in range(like.count)]

    @staticmethod
    def concat(data: Sequence[PendingValue]) -> DataProtoFuture:
        """Return one future of several futures or pending results, in order, without waiting."""
        if not data:
            raise LengthError("concat: expected at least one future, got an empty list")
        return DataProtoFuture(data)

    def __deepcopy__(self, memo: dict[int, object]) -> DataProtoFuture:
        return self  # a future names a result; a copy would name the same result

    def __repr__(self) -> str:
        path = "".join(f", part {part.index} of {part.count}" for part in self.parts)
        return f"DataProtoFuture({len(self.pending)} results{path})"


def _leaves(values: Sequence[PendingValue]) -> Iterator[PendingValue]:
    """Yield the results of ranks that futures, and futures of futures, wait for."""
    for value in values:
        if isinstance(value, DataProtoFuture):
            yield from _leaves(value.pending)
        else:
            yield value


def as_completed(
    futures: Iterable[DataProtoFuture], timeout: float | None = None
) -> Iterator[DataProtoFuture]:
    """Yield futures in the order in which they end, failed ones included.

    Raises `CallTimeoutError` if some have not ended `timeout` seconds after the first iteration.
    """
    expires = None if timeout is None else time.monotonic() + timeout
    waiting, pause = list(futures), _FIRST_PAUSE_S
    while waiting:
        late = expires is not None and time.monotonic() >= expires
        ended = [future.done() for future in waiting]
        yield from [future for future, end in zip(waiting, ended, strict=True) if end]
        waiting = [future for future, end in zip(waiting, ended, strict=True) if not end]
        if any(ended):
            pause = _FIRST_PAUSE_S
        elif late:
            raise CallTimeoutError(f"{len(waiting)} futures have no result after {timeout:g} s")
        else:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def _by_kind(pendings: Iterable[PendingValue]) -> dict[type, list[PendingValue]]:
    """Return class → its pending values."""
    kinds: dict[type, list[PendingValue]] = {}
    for pending in pendings:
        kinds.setdefault(type(pending), []).append(pending)
    return kinds


def _are_done(kind: type, pendings: Sequence[PendingValue]) -> bool:
    all_done: Callable[[Sequence[PendingValue]], bool] | None = getattr(kind, "all_done", None)
    return all(map(_is_done, pendings)) if all_done is None else all_done(pendings)


def _is_done(pending: PendingValue) -> bool:
    done: Callable[[], bool] | None = getattr(pending, "done", None)
    return True if done is None else done()


def _cancel(pending: PendingValue) -> bool:
    cancel: Callable[[], bool] | None = getattr(pending, "cancel", None)
    return False if cancel is None else cancel()


def _poll(pendings: Sequence[PendingValue], expires: float, timeout: float) -> None:
    """Wait until `expires`. `timeout`: the limit of the caller, of which a part may have passed."""
    pause = _FIRST_PAUSE_S
    while not all(map(_is_done, pendings)):
        if time.monotonic() >= expires:
            raise CallTimeoutError(
                f"The future has no result after {timeout:g} s. The call goes on."
            )
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)


def _join(results: list[Any]) -> Any:
    """Concatenate batches along their rows."""
    if all(isinstance(result, DataProto) for result in results):
        return DataProto.concat(results)
    if all(isinstance(result, DataProto | TensorDictBase) for result in results):
        joined = DataProto.concat([_as_dataproto(result) for result in results])
        return joined.to_tensordict()
    kinds = ", ".join(sorted({type(result).__name__ for result in results}))
    raise FieldError(f"a future joins results of type DataProto or TensorDict, got {kinds}")


def _as_dataproto(value: DataProto | TensorDictBase) -> DataProto:
    return value if isinstance(value, DataProto) else DataProto.from_tensordict(value)
