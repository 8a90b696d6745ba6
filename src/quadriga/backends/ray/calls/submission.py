"""Sending calls to the actors of ranks: `RayCallBackend`.

A call is packed once for all ranks that receive the same arguments. How it is sent depends on what
it holds:

    numbers, short strings, batches of small fields    bytes of Python's own pickler
    anything else                                      the `Call`, pickled by Ray for each rank
    the same, for a rank with coroutine methods        a reference to the `Call` in the store
    an argument above `BIG` that several ranks get     a reference to the argument in the store
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, cast

import ray

from quadriga.backends.ray.calls.store import RayStore, is_plain_batch, packed_batch
from quadriga.backends.ray.calls.waiting import RayBatch, RayPending
from quadriga.backends.ray.health.failures import died
from quadriga.backends.ray.health.nodes import dead_ranks, rank_alive
from quadriga.backends.ray.process.user_code import send_code_of_loaded_files
from quadriga.errors import WorkerError
from quadriga.protocol.containers import PLAIN_TYPES
from quadriga.single_controller.backend import RankHandle, RankSet
from quadriga.single_controller.call import Call, Pending, SharedArgument

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import RankActor, Ref, TwoReturns

BIG = 100 * 1024
"""Bytes. Ray sends a smaller argument inside the call and stores a larger one once per call."""
SAMPLED_ITEMS = 64
"""How many items of a container are measured."""
_SHORT = 1000
"""Length of a string that Python's pickler copies as fast as Ray's does."""


class RayCallBackend:
    """Implement `quadriga.single_controller.backend.CallBackend` on Ray actors."""

    @cached_property
    def store(self) -> RayStore:
        """Ray's object store."""
        return RayStore()

    def submit(
        self,
        ranks: RankSet,
        targets: Sequence[int],
        calls: Sequence[Call],
        timeout: float | None,
    ) -> Sequence[Pending]:
        """Submit one actor task per rank, named "role.method"."""
        label = f"{calls[0].role}.{calls[0].method}"
        handles = [ranks.handles[target] for target in targets]
        refs: list[Ref] = []
        fields: list[Ref | None] = []
        packed: dict[int, object] = {}
        for handle, call in zip(handles, calls, strict=True):
            key = id(call)
            if key not in packed:
                packed[key] = _packed(call, handle.facts.interleaves)
            method = handle.methods.get(label)
            if method is None:
                method = handle.methods[label] = RayMethod(handle.native, label)
            arguments = [packed[key]]
            if handle.facts.interleaves:
                arguments.append((handle.sender, handle.sent))
                handle.sent += 1
            ref, apart = method.send(*arguments)
            refs.append(ref)
            fields.append(apart)
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

    __slots__ = ("_actor", "_apart", "_invoke", "_label", "has_large_fields")

    def __init__(self, actor: RankActor, label: str) -> None:
        self._actor, self._label = actor, label
        self._invoke = actor.quadriga_invoke.options(name=label)
        self._apart: TwoReturns | None = None
        self.has_large_fields = False
        """Whether a result of this method had fields in the store (see `store`)."""

    def send(self, *arguments: object) -> tuple[Ref, Ref | None]:
        """Submit the task; return the references to its first and, if it has one, second return."""
        if not self.has_large_fields:
            return self._invoke.remote(*arguments), None
        if self._apart is None:
            method = self._actor.quadriga_invoke_apart.options(name=self._label, num_returns=2)
            self._apart = cast("TwoReturns", method)
        return self._apart.remote(*arguments)


class RayShared(SharedArgument):
    """A value in Ray's store that several ranks receive."""

    __slots__ = ("ref",)

    def __init__(self, ref: Ref) -> None:
        self.ref = ref

    def open(self) -> object:
        """Return the value."""
        return ray.get(self.ref)

    def __reduce__(self) -> tuple[object, ...]:
        return RayShared, (self.ref,)


def _packed(call: Call, with_ticket: bool) -> object:
    """Return what is sent for a call.

    A call with a ticket is opened by the rank itself and not by Ray: if an argument cannot be read
    there, the calls after it still get their turn.
    """
    values = (*call.args, *call.kwargs.values())
    if all(map(is_plain, values)):
        return pickle.dumps(call)
    if not all(map(_has_no_code, values)):
        send_code_of_loaded_files()
    return RayShared(ray.put(call)) if with_ticket else call


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
    return is_plain(value) or is_batch_of_data(value)


def is_batch_of_data(value: object) -> bool:
    """Return whether a packed value is a batch of tensors, arrays and handles of Ray's store."""
    batch = packed_batch(value)
    if batch is None or batch.kind is not None:
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
    sample = items[:SAMPLED_ITEMS]
    return sum(estimate(item, depth - 1) for item in sample) * len(items) // len(sample)
