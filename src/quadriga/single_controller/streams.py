"""The generators of one call, which yield items in their ranks while the controller receives them.

The controller asks each rank for one item per call, and for the next item before it returns the
current one. A rank therefore computes at most one item ahead, other calls run between the items,
and every step has the deadline and the errors of a call.

    controller   open next      next      next          "close" if it is dropped before the end
    rank             0    1         2         3         items computed
    program                0         1         2        items received
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from quadriga.errors import LengthError, QuadrigaError
from quadriga.single_controller.backend import CallBackend
from quadriga.single_controller.dispatch import Call, Collect, Pending, unpack_results


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
