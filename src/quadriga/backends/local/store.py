"""The store of the local backend: values stay in this process, held by their handles."""

from __future__ import annotations

import weakref
from typing import Any

from quadriga.protocol.values.storage import Handle, InProcessStore, LocalHandle, snapshot


class CountedHandle(LocalHandle):
    """A stored value. Pickled, it carries the value along."""

    __slots__ = ()


class LocalStore(InProcessStore):
    """Keeps a snapshot of each value in its handle; it goes when the last handle does.

    `bytes_held` and `objects_held` count what handles of this store still keep alive.
    """

    def __init__(self) -> None:
        self.bytes_held = 0
        self.objects_held = 0

    def put(self, value: Any, nbytes: int = 0) -> Handle:
        handle = CountedHandle(snapshot(value), nbytes)
        self.bytes_held += nbytes
        self.objects_held += 1
        weakref.finalize(handle, self._released, nbytes).atexit = False
        return handle

    def _released(self, nbytes: int) -> None:
        self.bytes_held -= nbytes
        self.objects_held -= 1
