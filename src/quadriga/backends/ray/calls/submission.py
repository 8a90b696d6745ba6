"""Sending calls to the actors of ranks: `RayCallBackend`.

A call is encoded once for all ranks that receive the same arguments, and every call of a submission
is encoded before the first is sent: an argument that cannot be pickled is an error before any rank
runs. How a call is sent depends on what it holds:

    numbers, short strings, batches of small fields    bytes: a pickle of tuples
    batches with fields in the store                   the same, and a list of their references
    anything else                                      `PickledCall`: bytes, buffers, references
    more than `BIG` in batches, or for a rank with     a reference to the call in the store
    coroutine methods
    an argument above `BIG` that several ranks get     a reference to the argument in the store
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import ray

from quadriga.backends.ray.calls.pickling import RayShared, pickled_call, shared_value
from quadriga.backends.ray.calls.row_store import RowHandleOnRay, StoreName, make_store
from quadriga.backends.ray.calls.splitting import split_futures
from quadriga.backends.ray.calls.store import (
    RayHandle,
    RayStore,
    Result,
    is_future,
    is_plain_batch,
    packed_batch,
)
from quadriga.backends.ray.calls.waiting import RayBatch, RayPending, RayPendings
from quadriga.backends.ray.health.failures import FailedCall, died
from quadriga.backends.ray.health.nodes import dead_ranks, rank_alive
from quadriga.errors import WorkerError
from quadriga.protocol.containers import PLAIN_TYPES
from quadriga.protocol.storage import Handle, LocalHandle
from quadriga.single_controller.backend import RankHandle, RankSet
from quadriga.single_controller.call import Call, Pending

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import RankActor, Ref, SeveralReturns

BIG = 100 * 1024
"""Bytes. Ray sends a smaller argument inside the call and stores a larger one once per call."""
SAMPLED_ITEMS = 64
"""How many items of a container are measured."""
_HANDLES = frozenset((RayHandle, RowHandleOnRay, LocalHandle))
"""Handles that `_encoded_data` can write."""
_SHORT = 1000
"""Length of a string that Python's pickler copies as fast as Ray's does."""


class RayCallBackend:
    """Implement `quadriga.single_controller.backend.CallBackend` on Ray actors."""

    def __init__(self, store: StoreName | RayStore = "auto") -> None:
        """`store`: how fields of another node are read, see `row_store.make_store`."""
        self.store = make_store(store)

    def submit(
        self,
        ranks: RankSet,
        targets: Sequence[int],
        calls: Sequence[Call],
        timeout: float | None,
    ) -> Sequence[Pending]:
        """Submit one actor task per rank, named "role.method"."""
        label = calls[0].label
        handles = [ranks.handles[target] for target in targets]
        if any(map(is_future, (*calls[0].args, *calls[0].kwargs.values()))):
            calls = split_futures(handles, calls)
        encoded: dict[tuple[int, bool], object] = {}
        sending: list[object] = []
        for handle, call in zip(handles, calls, strict=True):
            key = id(call), handle.facts.interleaves
            if key not in encoded:
                encoded[key] = encode(call, handle.facts.interleaves)
            sending.append(encoded[key])
        refs: list[Ref] = []
        fields: list[Sequence[Ref]] = []
        failure: tuple[RankHandle, Exception] | None = None
        # Under the lock, every rank receives the calls of two threads in the same order. Else:
        #   rank 0 receives a, b;  rank 1 receives b, a
        # If both calls contain a collective, rank 0 waits in that of a and rank 1 in that of b.
        with ranks.lock:
            for handle, sent in zip(handles, sending, strict=True):
                method = handle.methods.get(label)
                if method is None:
                    method = handle.methods[label] = RayMethod(handle.native, label)
                ticket = (handle.next_ticket(),) if handle.facts.interleaves else ()
                try:
                    ref, apart = method.send(sent, *ticket)
                except Exception as error:  # of Ray, or of an object that it pickles
                    handle.take_ticket_back()
                    failure = handle, error
                    break
                refs.append(ref)
                fields.append(apart)
        if failure is not None:
            # Not under the lock: this waits for the ranks that have received the call.
            received = FailedCall(refs, handles[: len(refs)], fields, label)
            try:
                raise received.not_sent(failure[0], failure[1], ranks) from failure[1]
            finally:
                del failure  # it refers to this frame, and so to the arguments
        batch = RayBatch(refs, handles, label, timeout, ranks, fields)
        ranks.in_flight.add(batch)
        return RayPendings(batch)

    def gather(self, pendings: Sequence[Pending]) -> list[object]:
        """Return all results. The first failure of any of them is raised as soon as it is known."""
        if isinstance(pendings, RayPendings):
            return list(pendings.batch.gather())
        RayPending.wait_all([p for p in pendings if isinstance(p, RayPending)])
        return [pending.result() for pending in pendings]

    def share(self, packed: object, value: object) -> object:
        """Return `packed`, or a reference to it in the store if several ranks should not each get
        a copy. Batches are small here: their fields are in the store already."""
        return shared_value(packed) if estimate(value) > BIG else packed

    def is_alive(self, handle: RankHandle) -> bool:
        """Return whether the rank's process exists: Ray's record of the actor decides."""
        return rank_alive(handle)

    def dead(self, handles: Sequence[RankHandle]) -> list[RankHandle]:
        """Return those of many ranks whose process has ended, with one probe per node."""
        return dead_ranks(handles)

    def death(self, ranks: RankSet, handle: RankHandle) -> WorkerError | None:
        """Return the error for a rank whose process has ended, with its last lines of output."""
        if not ray.is_initialized():
            return None
        labels = [batch.label for batch in list(ranks.in_flight) if batch.waits_for(handle)]
        idle = f"{'+'.join(ranks.roles)}."
        reason = ranks.broken or "its process has ended"
        return died(handle, labels[0] if labels else idle, reason)

    def kill(self, handle: RankHandle) -> None:
        """End the rank's process at once."""
        ray.kill(handle.native)


class RayMethod:
    """How one method of one rank is called. Kept by the handle: making one takes 20 µs."""

    __slots__ = ("_actor", "_apart", "_invoke", "_label", "objects")

    def __init__(self, actor: RankActor, label: str) -> None:
        self._actor, self._label = actor, label
        self._invoke = actor.quadriga_invoke.options(name=label)
        self._apart: tuple[int, SeveralReturns] | None = None
        self.objects: int | None = None
        """How many returns the fields of a result have filled (see `store`), None before the first
        result. A return that is not filled costs time, so a method without fields has none."""

    def send(self, *arguments: object) -> tuple[Ref, Sequence[Ref]]:
        """Submit the task; return the references to its result and to its returns of fields."""
        count = 1 if self.objects is None else self.objects
        if not count:
            return self._invoke.remote(*arguments), ()
        if self._apart is None or self._apart[0] != count:
            method = self._actor.quadriga_invoke_apart.options(
                name=self._label, num_returns=1 + count
            )
            self._apart = count, cast("SeveralReturns", method)
        ref, *fields = self._apart[1].remote(count, *arguments)
        return ref, fields

    def received(self, returned: object) -> None:
        """Note how many returns the fields of a result fill: the most of all results so far."""
        objects = returned.objects if isinstance(returned, Result) else 0
        if self.objects is None or objects > self.objects:
            self.objects = objects


def encode(call: Call, with_ticket: bool) -> object:
    """Return what is sent for a call.

    Raises `DispatchError` if an argument cannot be pickled. A call with a ticket must arrive soon
    after it was sent, because the calls after it wait for it (`ranks/call_order.py`). Ray delivers
    a task when its large arguments have arrived, so they go to the store, and the rank fetches
    them. So do batches with much data in their messages, such as rows of objects: for an argument
    that Ray stores itself, it has more work than for one that was put into the store here.
    """
    sent = _encoded_data(call)
    if sent is not None:
        return sent
    pickled = pickled_call(call)
    values = (*call.args, *call.kwargs.values())
    fetched = with_ticket or any(packed_batch(value) is not None for value in values)
    if fetched and pickled.nbytes > BIG:
        return RayShared(ray.put(pickled), pickled.label)
    return pickled


def _encoded_data(call: Call) -> bytes | tuple[bytes, list[Ref]] | None:
    """Return what is sent for a call of plain data, in a tenth of cloudpickle's time.

        Call("actor", "update", (Message … Location(ref 7f…) … Location(ref a2…),))
          →  (b"… 0 … 1 …",  [ref 7f…, ref a2…])

    Nothing but tuples, texts, numbers and bytes is pickled, so no class is looked up by its name.
    Ray's own pickler, which calls Python for every object, sees the references only. The pair is
    one argument of the task: Ray takes 10 µs more for two. None for a call with objects, code or
    long texts of the user, or with much data in its messages.
    """
    refs: list[Ref] = []
    numbers: dict[int, int] = {}
    size = 0

    def flat_handle(handle: Handle) -> tuple[object, ...]:
        if not isinstance(handle, RayHandle):
            # A process that sends no batch does not load this module, and torch with it.
            from quadriga.protocol.message import flat_of_handle

            return flat_of_handle(handle)
        at = numbers.get(id(handle.location))
        if at is None:
            at = numbers[id(handle.location)] = len(refs)
            refs.append(handle.ref)
        return type(handle) is RowHandleOnRay, at, handle.location.node, handle.nbytes, handle.index

    values: list[object] = []
    for value in (*call.args, *call.kwargs.values()) if call.kwargs else call.args:
        batch = packed_batch(value)
        if batch is None:
            if not is_plain(value):
                return None
            values.append(value)
            continue
        nbytes = batch.data_bytes(_HANDLES)
        if nbytes is None or (size := size + nbytes) > BIG:
            return None
        values.append(batch.flat(flat_handle))
    names = tuple(call.kwargs)
    whole = call.role, call.method, values, names, call.materialize, call.step
    data = pickle.dumps(whole, protocol=5)
    if len(data) > BIG:
        return None
    return (data, refs) if refs else data


def is_plain(value: object) -> bool:
    """Return whether Python's own pickler can pickle a value as well as Ray's, in half the time.

    True for numbers, short strings and batches of small fields: they hold no reference, and no code
    that must be sent.
    """
    if type(value) in PLAIN_TYPES:
        return not isinstance(value, str | bytes) or len(value) < _SHORT
    return is_plain_batch(value)


def is_batch_of_data(value: object) -> bool:
    """Return whether a packed value is a batch of tensors, arrays and handles of Ray's store."""
    batch = packed_batch(value)
    return batch is not None and batch.data_bytes(_HANDLES) is not None


def estimate(value: object, depth: int = 3) -> int:
    """Return the bytes of a value, roughly: strings, arrays, and containers of them."""
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if depth == 0 or not isinstance(value, list | tuple | dict | set):
        return sys.getsizeof(value, 0)
    items = list(value.values()) if isinstance(value, dict) else list(value)
    if not items:
        return 0
    # 1000 arrays of 1024 bytes: 64 of them have 65 536 bytes, so 65 536 · 1000 // 64 = 1 024 000.
    sample = items[:SAMPLED_ITEMS]
    return sum(estimate(item, depth - 1) for item in sample) * len(items) // len(sample)
