"""Calls whose references `ray.get` turns into values, for programs that call Ray themselves.

RayCallBackend.submit    reference to what `RayPending` opens: a packed result, fields apart
submit_value             reference to the value: numbers, tensors, batches of remote fields
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quadriga.backends.ray.calls.submission import _encoded
from quadriga.backends.ray.calls.waiting import RayPending
from quadriga.single_controller.backend import RankHandle, RankSet
from quadriga.single_controller.call import Call

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import Ref


def submit_value(ranks: RankSet, rank: int, call: Call) -> Ref:
    """Send one call to one rank. Return the reference to its value.

    The task is named "role.method". Calls of one controller start in the order in which they were
    sent, whichever of the two functions has sent them. Raises `DispatchError` if an argument cannot
    be pickled.
    """
    handle = ranks.handles[rank]
    sent = _encoded(call, handle.facts.interleaves)
    with ranks.lock:
        ticket = (handle.next_ticket(),) if handle.facts.interleaves else ()
        return _method(handle, call.label)(sent, *ticket)


def _method(handle: RankHandle, label: str) -> Callable[..., Ref]:
    key = f"value of {label}"
    if key not in handle.methods:
        handle.methods[key] = handle.native.quadriga_invoke_value.options(name=label).remote
    method: Callable[..., Ref] = handle.methods[key]
    return method


def pending_values(refs: Sequence[Ref]) -> list[RayPending]:
    """Return what a `DataProtoFuture` waits for, for the references of batches."""
    return [RayPending(ref, source="a reference of Ray") for ref in refs]
