"""What a rank's task returns: its reply, and its large fields apart.

An object that a worker puts is the worker's: all who learn of it have to tell it when they let it
go, and it is lost with the worker. A return of a task is the caller's from the start. So a method
whose replies have large fields is asked for two returns, the reply and the fields, and only the
reply is fetched by the controller. A second return is not free where it stays empty (a tiny call on
8 ranks took a third longer): whether a method needs one is seen at its first reply, whose fields
are put.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import ray

from quadriga.backends.ray.calls.plain import is_plain_batch
from quadriga.backends.ray.calls.store import BUNDLE_BYTES, Place, RayHandle, RayStore, alone_bytes
from quadriga.protocol.values.storage import Handle

RETURNED_BYTES = 100 * 1024
"""Ray sends returns below this through their caller's own memory; those are put as well."""


class Reply:
    """A value with handles to fields that lie at `place`."""

    __slots__ = ("place", "value")

    def __init__(self, value: Any, place: Place) -> None:
        self.value = value
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return Reply, (self.value, self.place)


def opened(reply: Any, fields: Any) -> Any:
    """The value that a task has returned. `fields`: the reference to its second return, if it was
    asked for one."""
    if type(reply) is bytes:
        return pickle.loads(reply)
    if not isinstance(reply, Reply):
        return reply
    if reply.place.ref is None:
        reply.place.ref = fields
    return reply.value


def _sent(value: Any) -> Any:
    """What is sent for a value without large fields; bytes are a pickle, whatever they hold."""
    return pickle.dumps(value) if type(value) is bytes or is_plain_batch(value) else value


class RayMethod:
    """How one method of one rank is called."""

    __slots__ = ("_apart", "_invoke", "_label", "_native", "has_large_fields")

    def __init__(self, native: Any, label: str) -> None:
        self._native, self._label = native, label
        self._invoke = native.quadriga_invoke.options(name=label)
        self._apart: Any = None
        self.has_large_fields = False

    def send(self, *arguments: Any) -> tuple[Any, Any]:
        """The references to the reply and, where it has had large fields before, to those."""
        if not self.has_large_fields:
            return self._invoke.remote(*arguments), None
        if self._apart is None:
            self._apart = self._native.quadriga_invoke_apart.options(
                name=self._label, num_returns=2
            )
        ref, fields = self._apart.remote(*arguments)
        return ref, fields


class ReplyStore(RayStore):
    """The store of one reply: keeps the fields that are put together until the reply is made."""

    def __init__(self) -> None:
        self._place = Place()
        self._fields: list[Any] = []
        self._nbytes = 0

    def put_many(self, values: Sequence[tuple[Any, int]]) -> list[Handle]:
        return [self._keep(value, nbytes) for value, nbytes in values]

    def _keep(self, value: Any, nbytes: int) -> Handle:
        if nbytes >= alone_bytes() or self._nbytes + nbytes > BUNDLE_BYTES:
            return self.put(value, nbytes)
        self._fields.append(value)
        self._nbytes += nbytes
        return RayHandle(self._place, nbytes, len(self._fields) - 1)

    def reply(self, value: Any, apart: bool) -> tuple[Any, Any]:
        """The first and, with `apart`, the second return of the task."""
        if not self._fields:
            return _sent(value), None
        fields, reply = tuple(self._fields), Reply(value, self._place)
        if apart and self._nbytes >= RETURNED_BYTES:
            return reply, fields
        self._place.ref = ray.put(fields)
        return reply, None
