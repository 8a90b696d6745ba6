"""The store of the Ray backend: values lie in Ray's object store, counted by Ray's references.

Every object costs its owner and each process that holds a reference some tenths of a millisecond
in bookkeeping, so the fields of one shard are put together into one object. On one node that
changes nothing for a reader: it sees shared memory, and copies only what it reads. To another node
the object travels whole; in a cluster of several, fields of `ALONE_BYTES` or more are objects of
their own, so that reading a small field never fetches a large one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import ray

from quadriga.errors import LostObjectError
from quadriga.protocol.values.storage import Handle, fetch_many

ALONE_BYTES = 16 * 2**20
BUNDLE_BYTES = 64 * 2**20
"""What was put together is also freed together, so even on one node no more than this is."""

_LOST = (
    ray.exceptions.ObjectLostError,
    ray.exceptions.ReferenceCountingAssertionError,
    ray.exceptions.ObjectFetchTimedOutError,
)
_WHOLE = -1


class Place:
    """Where an object lies. `ref`: Ray's reference; None while the object is the second return of
    a task under way, whose reference only the caller has (`replies.py`)."""

    __slots__ = ("ref",)

    def __init__(self, ref: Any = None) -> None:
        self.ref = ref

    def __reduce__(self) -> tuple[Any, ...]:
        return Place, (self.ref,)


class RayHandle:
    """A value in Ray's store: all of an object, or one of the values that were put together.

    Pickled inside a call, a reply or another object, it passes a Ray reference on; the object is
    released when the last process drops the last reference.
    """

    __slots__ = ("index", "nbytes", "place")

    def __init__(self, place: Place, nbytes: int, index: int = _WHOLE) -> None:
        self.place = place
        self.nbytes = nbytes
        self.index = index

    @property
    def key(self) -> str:
        return f"{self.place.ref.hex()}:{self.index}"

    def fetch(self) -> Any:
        return self.fetch_many([self])[0]

    @staticmethod
    def fetch_many(handles: Sequence[Any]) -> list[Any]:
        """Views of shared memory, one `ray.get` for all. Raises `LostObjectError` when one is gone:
        its owner, the process that put it, has died."""
        found = [handle.place.ref for handle in handles]
        refs = list(dict.fromkeys(found))
        try:
            objects = dict(zip(refs, ray.get(refs), strict=True))
        except _LOST as error:
            raise LostObjectError(f"an object in Ray's store is gone: {error}") from error
        return [
            objects[ref] if handle.index == _WHOLE else objects[ref][handle.index]
            for ref, handle in zip(found, handles, strict=True)
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return RayHandle, (self.place, self.nbytes, self.index)


class RayStore:
    """Puts values into Ray's object store; this process owns what it puts."""

    in_process = False

    def put(self, value: Any, nbytes: int = 0) -> Handle:
        return RayHandle(Place(ray.put(value)), nbytes)

    def put_many(self, values: Sequence[tuple[Any, int]]) -> list[Handle]:
        handles: list[Handle | None] = [None] * len(values)
        for bundle in _bundles([nbytes for _, nbytes in values], alone_bytes()):
            if len(bundle) == 1:
                handles[bundle[0]] = self.put(*values[bundle[0]])
                continue
            place = Place(ray.put(tuple(values[i][0] for i in bundle)))
            for index, i in enumerate(bundle):
                handles[i] = RayHandle(place, values[i][1], index)
        return [handle for handle in handles if handle is not None]

    def get_many(self, handles: Sequence[Handle]) -> list[Any]:
        return fetch_many(handles)


@cache
def alone_bytes() -> int:
    """From which size on a value is an object of its own; asks for the nodes once a process."""
    nodes = sum(node["Alive"] for node in ray.nodes())
    return BUNDLE_BYTES if nodes == 1 else ALONE_BYTES


def _bundles(sizes: Sequence[int], alone: int) -> list[list[int]]:
    """Which values become one object, by index: those of `alone` bytes or more each one, others up
    to `BUNDLE_BYTES`."""
    bundles: list[list[int]] = []
    room = 0
    for i, size in enumerate(sizes):
        if size >= alone:
            bundles.insert(0, [i])
        elif bundles and size <= room:
            bundles[-1].append(i)
            room -= size
        else:
            bundles.append([i])
            room = BUNDLE_BYTES - size
    return bundles
