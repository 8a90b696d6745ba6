"""The generators of one call, which yield items in their ranks while the controller receives them.

The controller asks each rank for one item per call, and for the next item before it returns the
current one. A rank therefore computes at most one item ahead, other calls run between the items,
and every step has the deadline and the errors of a call.

    controller   open next      next      next          "close" if it is dropped before the end
    rank             0    1         2         3         items computed
    program                0         1         2        items received
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal

from quadriga.errors import LengthError, QuadrigaError
from quadriga.single_controller.backend import Backend
from quadriga.single_controller.dispatch import Call, Collect, Pending, unpack_results


def joined_items(
    backend: Backend,
    send: Callable[[Sequence[Call]], Sequence[Pending]],
    targets: Sequence[int],
    opening: Sequence[Call],
    collect: Collect,
) -> Iterator[object]:
    """Yield the joined items of the generators of one call. They start with the first item.

    Args:
        backend: what receives the results.
        send: `send(calls)` sends `calls[i]` to rank `targets[i]`.
        targets: the executing ranks.
        opening: the calls that start the generators and return their first items.
        collect: joins item i of every rank.
    """
    first, count = opening[0], 0

    def step(action: Literal["next", "close"]) -> Sequence[Pending]:
        assert first.step is not None
        call = Call(first.role, first.method, step=replace(first.step, action=action))
        return send([call] * len(targets))

    try:
        # Inside `try`: if a later rank cannot be called, the generators of the others are ended.
        waiting = deque([send(opening)])
        while True:
            waiting.append(step("next"))
            # A tuple of the item of each rank, an empty one at the end.
            results = unpack_results(backend.gather(waiting.popleft()))
            items = [result for result in results if isinstance(result, tuple)]
            ended = [rank for rank, item in zip(targets, items, strict=True) if not item]
            if len(ended) == len(items):
                return
            if ended:
                raise LengthError(
                    f"{first.label}: rank(s) {ended} ended after {count} item(s), other ranks did "
                    "not. Let every rank yield the same number."
                )
            count += 1
            yield collect([value for (value,) in items])
    finally:  # also if the program drops the iterator
        with suppress(QuadrigaError):  # of a group that is broken
            step("close")
