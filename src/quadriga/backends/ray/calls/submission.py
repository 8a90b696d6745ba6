"""Carrying calls to Ray actors and their answers back."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import ray
from ray.exceptions import RayTaskError

from quadriga.backends.ray.calls.plain import is_plain
from quadriga.backends.ray.calls.results import RayMethod, opened
from quadriga.backends.ray.calls.sharing import RayShared, share
from quadriga.backends.ray.calls.store import RayStore
from quadriga.backends.ray.calls.waiting import RayBatch
from quadriga.backends.ray.health.failures import DEAD, died
from quadriga.backends.ray.health.liveness import rank_alive
from quadriga.backends.ray.process.user_code import send_code_of_loaded_files
from quadriga.errors import QuadrigaError, WorkerDiedError, WorkerError
from quadriga.single_controller.backend import RankHandle, RankSet
from quadriga.single_controller.call import Call, Pending


class RayPending:
    """One rank's answer. Where the call was made it knows its peers, so that a failure of any
    of them ends the wait; when it travels, only the reference does."""

    __slots__ = ("batch", "fields", "index", "ref", "source")

    def __init__(
        self,
        ref: Any,
        fields: Any = None,
        batch: RayBatch | None = None,
        index: int = 0,
        source: str = "",
    ) -> None:
        self.ref = ref
        self.fields = fields
        """The second return of the task, where it has one."""
        self.batch = batch
        self.index = index
        self.source = source
        """Whose answer it is, where the batch is not known."""

    @property
    def arrived(self) -> Any:
        """The value if it was waited for already, else None."""
        known = self.batch is not None and self.batch.values is not None
        return self.batch.values[self.index] if known else None

    def result(self) -> Any:
        """Wait for the value; raises what the worker raised."""
        if self.batch is not None:
            return self.batch.gather()[self.index]
        return opened(_value(self.ref, self.source), self.fields)

    def __reduce__(self) -> tuple[Any, ...]:
        source = self.source
        if self.batch is not None:
            facts = self.batch.handles[self.index].facts
            source = f"{self.batch.label}, rank {facts.rank} on {facts.node}"
        return RayPending, (self.ref, self.fields, None, 0, source)


def _packed(call: Call, with_ticket: bool) -> Any:
    """What is sent for a call.

    One of plain data is pickled here, once for all ranks that receive the same. One that has a
    ticket is read by the rank itself: if it cannot be, the ranks' calls after it have their turn
    all the same.
    """
    if all(map(is_plain, (*call.args, *call.kwargs.values()))):
        return pickle.dumps(call)
    send_code_of_loaded_files()
    return RayShared(ray.put(call)) if with_ticket else call


def _value(ref: Any, source: str) -> Any:
    """A value that another process asked for; this process knows nothing of the rank."""
    try:
        return ray.get(ref)
    except RayTaskError as error:
        if isinstance(error.cause, QuadrigaError):
            raise error.cause from error
        raise
    except DEAD as error:
        raise WorkerDiedError(
            f"An argument was to come from {source}, whose process is gone."
        ) from error


class RayCallBackend:
    """See `quadriga.single_controller.backend.CallBackend`."""

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
        """One actor task per rank, named "role.method"."""
        label = f"{calls[0].role}.{calls[0].method}"
        handles = [ranks.handles[target] for target in targets]
        refs, fields = [], []
        packed: dict[int, Any] = {}
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

    def gather(self, pendings: Sequence[Pending]) -> list[Any]:
        """All answers of one submission; the first failure is raised as soon as it is known."""
        batches = {id(p.batch): p.batch for p in pendings if isinstance(p, RayPending)}
        values = {key: batch.gather() for key, batch in batches.items() if batch}
        return [
            values[id(p.batch)][p.index] if isinstance(p, RayPending) and p.batch else p.result()
            for p in pendings
        ]

    def share(self, packed: Any, value: Any) -> Any:
        """What is packed, stored once if it is big."""
        return share(packed, value)

    def is_alive(self, handle: RankHandle) -> bool:
        """Whether Ray knows of no death and the rank's node answers."""
        return rank_alive(handle)

    def death(self, ranks: RankSet, handle: RankHandle) -> WorkerError | None:
        """The error for a rank that is gone, with what it wrote last."""
        if not ray.is_initialized():
            return None
        labels = [batch.label for batch in list(ranks.in_flight) if batch.waits_for(handle)]
        idle = f"{'+'.join(ranks.roles)}."
        reason = ranks.broken or "its process is gone"
        return died(handle, labels[0] if labels else idle, reason)

    def kill(self, handle: RankHandle) -> None:
        """End the rank's process at once."""
        ray.kill(handle.native)
