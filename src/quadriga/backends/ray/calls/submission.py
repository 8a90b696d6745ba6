"""Sending calls to the actors of ranks: `RayCallBackend`.

A call is encoded once for all ranks that receive the same arguments, and every call of a submission
is encoded before the first is sent: an argument that cannot be pickled is an error before any rank
runs. How a call is sent depends on what it holds:

    numbers, short strings, batches of small fields    bytes of Python's own pickler
    batches with fields in the store                   the same, and a list of their references
    anything else                                      `PickledCall`: bytes, buffers, references
    more than `BIG`, for a rank with coroutine methods a reference to the call in the store
    an argument above `BIG` that several ranks get     a reference to the argument in the store
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import ray
from ray import cloudpickle

from quadriga.backends.ray.calls.row_store import StoreName, make_store
from quadriga.backends.ray.calls.splitting import split_futures
from quadriga.backends.ray.calls.store import (
    RayStore,
    Result,
    is_future,
    is_plain_batch,
    packed_batch,
)
from quadriga.backends.ray.calls.waiting import RayBatch, RayPending
from quadriga.backends.ray.health.failures import FailedCall, died
from quadriga.backends.ray.health.nodes import dead_ranks, rank_alive
from quadriga.backends.ray.process.user_code import send_code_of_loaded_files
from quadriga.errors import DispatchError, WorkerError
from quadriga.protocol.containers import PLAIN_TYPES
from quadriga.single_controller.backend import RankHandle, RankSet
from quadriga.single_controller.call import Call, Pending, SharedArgument

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import RankActor, Ref, SeveralReturns

BIG = 100 * 1024
"""Bytes. Ray sends a smaller argument inside the call and stores a larger one once per call."""
SAMPLED_ITEMS = 64
"""How many items of a container are measured."""
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
        for handle, call in zip(handles, calls, strict=True):
            key = id(call), handle.facts.interleaves
            if key not in encoded:
                encoded[key] = _encoded(call, handle.facts.interleaves)
        refs: list[Ref] = []
        fields: list[Sequence[Ref]] = []
        failure: tuple[RankHandle, Exception] | None = None
        # Under the lock, every rank receives the calls of two threads in the same order. Else:
        #   rank 0 receives a, b;  rank 1 receives b, a
        # If both calls contain a collective, rank 0 waits in that of a and rank 1 in that of b.
        with ranks.lock:
            for handle, call in zip(handles, calls, strict=True):
                method = handle.methods.get(label)
                if method is None:
                    method = handle.methods[label] = RayMethod(handle.native, label)
                sent = encoded[id(call), handle.facts.interleaves]
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
            raise received.not_sent(failure[0], failure[1], ranks) from failure[1]
        batch = RayBatch(refs, handles, label, timeout, ranks, fields)
        ranks.in_flight.add(batch)
        return [
            RayPending(ref, apart, batch, index)
            for index, (ref, apart) in enumerate(zip(refs, fields, strict=True))
        ]

    def gather(self, pendings: Sequence[Pending]) -> list[object]:
        """Return all results. The first failure of any of them is raised as soon as it is known."""
        RayPending.wait_all([p for p in pendings if isinstance(p, RayPending)])
        return [pending.result() for pending in pendings]

    def share(self, packed: object, value: object) -> object:
        """Return `packed`, or a reference to it in the store if several ranks should not each get
        a copy. Batches are small here: their fields are in the store already."""
        return RayShared(ray.put(packed)) if estimate(value) > BIG else packed

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


class RayShared(SharedArgument):
    """A value in Ray's store. `label`: (role, method) if the value is a call."""

    __slots__ = ("label", "ref")

    def __init__(self, ref: Ref, label: tuple[str, str] = ("", "")) -> None:
        self.ref = ref
        self.label = label

    def open(self) -> object:
        """Return the value."""
        return ray.get(self.ref)

    def __reduce__(self) -> tuple[object, ...]:
        return RayShared, (self.ref, self.label)


class PickledCall(SharedArgument):
    """A call that was pickled here. The rank unpickles it, and not Ray.

    `buffers` are the large arrays of the call, which Ray sends without copying them. `refs` are the
    references in it: Ray must see them to keep their objects, so they are not in the bytes.
    """

    __slots__ = ("buffers", "data", "label", "refs")

    def __init__(
        self,
        label: tuple[str, str],
        data: bytes,
        buffers: Sequence[pickle.PickleBuffer],
        refs: Sequence[Ref],
    ) -> None:
        self.label = label
        """(role, method), for the error if the call cannot be unpickled."""
        self.data, self.buffers, self.refs = data, buffers, refs

    @property
    def nbytes(self) -> int:
        """The size of the bytes and buffers."""
        return len(self.data) + sum(buffer.raw().nbytes for buffer in self.buffers)

    def open(self) -> object:
        """Return the call."""
        _unpickling.refs = self.refs
        try:
            return pickle.loads(self.data, buffers=self.buffers)
        finally:
            _unpickling.refs = ()

    def __reduce__(self) -> tuple[object, ...]:
        return PickledCall, (self.label, self.data, self.buffers, self.refs)


class _Unpickling(threading.local):
    """The references of the call that this thread unpickles."""

    refs: Sequence[Ref] = ()


_unpickling = _Unpickling()


def _reference(index: int) -> Ref:
    return _unpickling.refs[index]


class _CallPickler(cloudpickle.Pickler):
    """Pickle a call. Its references are collected in `refs` and replaced by their numbers."""

    def __init__(
        self, file: io.BytesIO, buffer_callback: Callable[[pickle.PickleBuffer], None]
    ) -> None:
        super().__init__(  # type: ignore[no-untyped-call]  # cloudpickle has no types
            file, protocol=5, buffer_callback=buffer_callback
        )
        self.refs: list[Ref] = []

    def reducer_override(self, value: object) -> Any:  # as cloudpickle returns it
        """Return how `value` is pickled. Called for every object that is not of a builtin type."""
        if isinstance(value, ray.ObjectRef):
            self.refs.append(value)
            return _reference, (len(self.refs) - 1,)
        return super().reducer_override(value)  # type: ignore[no-untyped-call]  # cloudpickle


def _encoded_data(call: Call) -> bytes | tuple[bytes, list[Ref]]:
    """Return what is sent for a call without code of the user, in a tenth of cloudpickle's time.

        Call("actor", "update", (Message … Location(ref 7f…) … Location(ref a2…),))
          →  (b"… _reference(0) … _reference(1) …",  [ref 7f…, ref a2…])

    Ray's own pickler, which calls Python for every object, sees the references only. The pair is
    one argument of the task: Ray takes 10 µs more for two.
    """
    refs: list[Ref] = []

    def reduce_ref(ref: Ref) -> tuple[object, ...]:
        refs.append(ref)
        return _reference, (len(refs) - 1,)

    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5)
    table: Any = {ray.ObjectRef: reduce_ref}  # pickle's type of a table excludes such a reducer
    pickler.dispatch_table = table
    pickler.dump(call)
    data = file.getvalue()
    return (data, refs) if refs else data


def _encoded(call: Call, with_ticket: bool) -> object:
    """Return what is sent for a call.

    Raises `DispatchError` if an argument cannot be pickled. A call with a ticket must arrive soon
    after it was sent, because the calls after it wait for it (`ranks/call_order.py`). Ray delivers
    a task when its large arguments have arrived, so they go to the store, and the rank fetches
    them.
    """
    values = (*call.args, *call.kwargs.values())
    if all(map(is_plain, values)):
        data = pickle.dumps(call)
        return RayShared(ray.put(data)) if with_ticket and len(data) > BIG else data
    if all(map(_has_no_code, values)):
        sent = _encoded_data(call)
        if len(sent if isinstance(sent, bytes) else sent[0]) <= BIG:
            return sent
    else:
        send_code_of_loaded_files()
    call = replace(
        call,
        args=tuple(map(_top_level, call.args)),
        kwargs={name: _top_level(value) for name, value in call.kwargs.items()},
    )
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    pickler = _CallPickler(file, buffers.append)
    try:
        pickler.dump(call)  # type: ignore[no-untyped-call]  # cloudpickle has no types
    except Exception as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise DispatchError(
            f"{call.label}: an argument cannot be sent to the workers: {first_line}. Pass data "
            "that can be pickled, or let the worker build the object itself."
        ) from error
    pickled = PickledCall((call.role, call.method), file.getvalue(), buffers, pickler.refs)
    if with_ticket and pickled.nbytes > BIG:
        return RayShared(ray.put(pickled), pickled.label)
    return pickled


def _top_level(value: object) -> object:
    """Return an argument for a reference among the arguments that is opened by the rank.

    As in Ray itself, a method receives the object of a reference that is an argument, and the
    reference of one inside another argument.
    """
    return RayShared(value) if isinstance(value, ray.ObjectRef) else value


def is_plain(value: object) -> bool:
    """Return whether Python's own pickler can pickle a value as well as Ray's, in half the time.

    True for numbers, short strings and batches of small fields: they hold no reference, and no code
    that must be sent.
    """
    if type(value) in PLAIN_TYPES:
        return not isinstance(value, str | bytes) or len(value) < _SHORT
    return is_plain_batch(value)


def _has_no_code(value: object) -> bool:
    """Return whether a value cannot hold functions or classes of the user's files."""
    return is_batch_of_data(value) or is_plain(value)


def is_batch_of_data(value: object) -> bool:
    """Return whether a packed value is a batch of tensors, arrays and handles of Ray's store."""
    batch = packed_batch(value)
    if batch is None or batch.kind is not None or batch.attributes:
        return False
    entries = (*batch.tensors.values(), *batch.arrays.values())
    return all(entry.spec.kind != "raw" for entry in entries) and all(
        type(item) in PLAIN_TYPES for item in batch.meta.values()
    )


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
