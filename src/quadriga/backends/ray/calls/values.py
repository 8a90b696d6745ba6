"""Calls whose references `ray.get` turns into values, for programs that call Ray themselves.

RayCallBackend.submit    reference to what `RayPending` opens: a packed result, fields apart
submit_values            reference to the value: numbers, tensors, batches of remote fields
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quadriga.backends.ray.calls.submission import encode
from quadriga.backends.ray.calls.waiting import RayPending
from quadriga.backends.ray.health.failures import FailedCall
from quadriga.single_controller.backend import RankHandle, RankSet
from quadriga.single_controller.call import Call

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import Ref


def submit_values(ranks: RankSet, targets: Sequence[int], calls: Sequence[Call]) -> list[Ref]:
    """Send `calls[i]` to rank `targets[i]`. Return the references to their values.

    The tasks are named "role.method". Calls of one controller start in the order in which they were
    sent, whichever of the two functions has sent them. Raises `DispatchError` if an argument cannot
    be pickled: no call was sent then. Raises `WorkerError` if a call cannot be sent.
    """
    handles = [ranks.handles[target] for target in targets]
    encoded: dict[int, object] = {}  # ranks that receive the same arguments have one call
    for handle, call in zip(handles, calls, strict=True):
        if id(call) not in encoded:
            encoded[id(call)] = encode(call, handle.facts.interleaves)
    refs: list[Ref] = []
    # Under the lock, every rank receives the calls of two threads in the same order.
    with ranks.lock:
        for handle, call in zip(handles, calls, strict=True):
            ticket = (handle.next_ticket(),) if handle.facts.interleaves else ()
            try:
                refs.append(_method(handle, call.label)(encoded[id(call)], *ticket))
            except Exception as error:  # of Ray
                handle.take_ticket_back()
                received = FailedCall(refs, handles[: len(refs)], (), call.label)
                raise received.not_sent(handle, error, ranks) from error
    return refs


def _method(handle: RankHandle, label: str) -> Callable[..., Ref]:
    key = f"value of {label}"
    if key not in handle.methods:
        handle.methods[key] = handle.native.quadriga_invoke_value.options(name=label).remote
    method: Callable[..., Ref] = handle.methods[key]
    return method


def pending_values(refs: Sequence[Ref]) -> list[RayPending]:
    """Return what a `DataProtoFuture` waits for, for the references of batches."""
    return [RayPending(ref, label="a reference of Ray") for ref in refs]
