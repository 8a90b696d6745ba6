"""Futures of which many ranks receive a part: one of them splits the batch for all.

A rank that receives part i of a future waits for all n results and takes its rows. For n receivers
these are n² references in the calls, and n² requests to the controller, which owns the results.
From `MANY` on, the first receiver gets another task before its call: it waits for the results once
and returns each part as an object of its own. With the results r0 … r3 and 4 receivers:

    each for itself    call 0 (part 0 of r0 r1 r2 r3)  …  call 3 (part 3 of r0 r1 r2 r3)     16
    one for all        rank 0: split (r0 r1 r2 r3) → p0 p1 p2 p3
                       call 0 (p0)  …  call 3 (p3)                                            8

Consumes: the calls of one submission. Produces: the same calls, with the futures of p0 … p3. The
other receivers wait for rank 0. The first failure of any result is the failure of every part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from quadriga.backends.ray.calls.store import is_future
from quadriga.backends.ray.calls.waiting import RayPending
from quadriga.backends.ray.process.user_code import send_code_of_loaded_files
from quadriga.single_controller.backend import RankHandle
from quadriga.single_controller.call import Call

if TYPE_CHECKING:
    from quadriga.protocol.boundary import DataProtoFuture, Part

MANY = 256
"""Receivers × results of a future from which on one rank splits it. Below, the task that is saved
is worth more than the references."""

Splits: TypeAlias = "list[tuple[DataProtoFuture, Part]]"
"""Futures, and how each is split: any part of it."""
_Key: TypeAlias = tuple[int, Hashable]  # equal for the parts of one future


def split_futures(handles: Sequence[RankHandle], calls: Sequence[Call]) -> Sequence[Call]:
    """Return the calls with the futures that one rank splits replaced by their parts.

    Calls that receive futures themselves (`materialize=False`) are returned as they are, and so are
    futures inside lists and dicts.
    """
    if not calls[0].materialize:
        return calls
    futures = [
        value for call in calls for value in (*call.args, *call.kwargs.values()) if is_future(value)
    ]
    receivers = Counter(map(_key, futures))
    many = {
        _key(future): (future.whole(), future.part)
        for future in futures
        if receivers[_key(future)] * len(future.pending) >= MANY
    }
    if not many:
        return calls
    parts = dict(zip(many, _split(handles[0], calls[0].label, list(many.values())), strict=True))
    # Loaded, because there are futures.
    from quadriga.protocol.boundary import DataProtoFuture

    def part(value: object) -> object:
        if is_future(value) and _key(value) in parts:
            return DataProtoFuture([parts[_key(value)][value.part.index]], the_value)
        return value

    # By identity: ranks that receive the same call still do, so that it is encoded once.
    replaced = {
        id(call): replace(
            call,
            args=tuple(map(part, call.args)),
            kwargs={name: part(value) for name, value in call.kwargs.items()},
        )
        for call in calls
    }
    return [replaced[id(call)] for call in calls]


def _split(handle: RankHandle, label: str, splits: Splits) -> list[list[RayPending]]:
    """Have a rank split futures, all in one task: it must not wait for one while another fails.

    Return the parts of each.
    """
    send_code_of_loaded_files()
    counts = [part.count for _, part in splits]
    method = handle.native.quadriga_split.options(name=f"{label}: split", num_returns=sum(counts))
    sent = method.remote(splits)
    refs = iter([sent] if sum(counts) == 1 else sent)
    source = f"the split of a future for {label}, rank {handle.facts.rank} on {handle.facts.node}"
    return [[RayPending(ref, label=source) for ref in islice(refs, n)] for n in counts]


def the_value(values: Sequence[object]) -> object:
    """Return the value of a future with one result, as it is: not every value is a batch."""
    (value,) = values
    return value


def _key(future: DataProtoFuture) -> _Key:
    split = (*future.parts[:-1], future.part.count, future.part.uneven)
    return id(future.pending), (id(future.collect_fn), *split)
