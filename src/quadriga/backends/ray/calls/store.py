"""Ray's object store as the `Store` of the protocol, and the result of a rank's task.

    task of a rank ──► first return:  Result(value, location)   the controller fetches it
                   └─► second return: (field, field, …)         readers fetch it, by handle

**One object for a shard.** Every object costs its owner, and each process that holds a reference,
some tenths of a millisecond. The fields of one shard are therefore put together into one object.
On one node a reader maps shared memory and copies only the fields that it reads. To another node an
object is sent as a whole, so in a cluster of several nodes a field of `ALONE_BYTES` or more is an
object of its own: reading a small field never fetches a large one.

**Ownership.** An object that a worker puts belongs to the worker: each process that learns of it
tells the worker when it drops its reference, and the object is lost if the worker dies. A return of
a task belongs to the caller from the start. A method whose results have large fields is therefore
called with two returns, the result and its fields. An empty second return is not free (a tiny call
on 8 ranks took a third longer), so the first call of a method has one return; its large fields, if
there are any, are put by the worker, and every later call of that method has two.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, cast

import ray

from quadriga.backends.ray.cluster import cluster_nodes
from quadriga.errors import LostObjectError
from quadriga.protocol.values.storage import Handle, Transport, fetch_many, transports

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import Ref
    from quadriga.protocol.message import Message

# Two float32 fields in a cluster of several nodes:
#   [1024, 4096]  16 777 216 bytes = ALONE_BYTES      an object of its own
#   [1024, 4095]  16 773 120 bytes < ALONE_BYTES      put together with other fields
ALONE_BYTES = 16 * 2**20
BUNDLE_BYTES = 64 * 2**20
"""Fields of one object are freed together, so an object holds no more than this on one node too."""
RETURNED_BYTES = 100 * 1024
"""Ray sends smaller returns through the memory of the caller; such fields are put instead."""

_LOST = (
    ray.exceptions.ObjectLostError,
    ray.exceptions.ReferenceCountingAssertionError,
    ray.exceptions.ObjectFetchTimedOutError,
)
_WHOLE = -1


def _is_pickling() -> bool:
    """Whether Ray pickles a call, a result or an object, and counts the references in it."""
    if not ray.is_initialized():
        return False
    worker = ray._private.worker.global_worker
    context = worker.get_serialization_context()  # type: ignore[no-untyped-call]  # of Ray
    return bool(context.is_in_band_serialization())


transports.append(Transport((ray.ObjectRef, ray.actor.ActorHandle), _is_pickling))


class Location:
    """Where an object is stored. `ref` is None while the object is the second return of a running
    task: only the caller has that reference, and sets it when the result arrives (`opened`)."""

    __slots__ = ("ref",)

    def __init__(self, ref: Ref | None = None) -> None:
        self.ref = ref

    def __reduce__(self) -> tuple[object, ...]:
        return Location, (self.ref,)


class RayHandle:
    """A value in Ray's store: a whole object, or one of the values that were put together.

    Pickled inside a call, a result or another object, it passes on a Ray reference. Ray releases
    the object when the last process drops its last reference.
    """

    __slots__ = ("index", "location", "nbytes")

    def __init__(self, location: Location, nbytes: int, index: int = _WHOLE) -> None:
        self.location = location
        self.nbytes = nbytes
        self.index = index

    @property
    def key(self) -> str:
        """The reference and the position in the object."""
        return f"{self._ref().hex()}:{self.index}"

    def fetch(self) -> object:
        """Return the value. Raises `LostObjectError` if it is lost."""
        return self.fetch_many([self])[0]

    @staticmethod
    def fetch_many(handles: Sequence[RayHandle]) -> list[object]:
        """Return the values as views of shared memory, with one `ray.get` for all of them.

        Raises `LostObjectError` if one is lost because the process that owned it has ended.
        """
        # Two handles of object A and one of B: found = [A, A, B], and Ray is asked for [A, B].
        found = [handle._ref() for handle in handles]
        refs = list(dict.fromkeys(found))
        try:
            objects = dict(zip(refs, ray.get(refs), strict=True))
        except _LOST as error:
            raise LostObjectError(f"An object of Ray's store is lost: {error}") from error
        return [
            _item(objects[ref], handle.index) for ref, handle in zip(found, handles, strict=True)
        ]

    def _ref(self) -> Ref:
        if self.location.ref is None:
            raise LostObjectError("This field is part of a result that has not been received.")
        return self.location.ref

    def __reduce__(self) -> tuple[object, ...]:
        return RayHandle, (self.location, self.nbytes, self.index)


def _item(stored: object, index: int) -> object:
    if index == _WHOLE:
        return stored
    assert isinstance(stored, tuple)
    return stored[index]


class RayStore:
    """Put values into Ray's object store. The process that puts a value owns it."""

    in_process = False

    @property
    def session(self) -> object:
        """The driver and the cluster whose objects this store keeps: equal for equal objects."""
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_job_id()

    def put(self, value: object, nbytes: int = 0) -> Handle:
        """Store one value as an object of its own."""
        return RayHandle(Location(ray.put(value)), nbytes)

    def put_many(self, values: Sequence[tuple[object, int]]) -> list[Handle]:
        """Store `(value, nbytes)` pairs, small values together; return the handles in order."""
        handles: dict[int, Handle] = {}
        for bundle in _bundles([nbytes for _, nbytes in values], alone_bytes()):
            if len(bundle) == 1:
                handles[bundle[0]] = self.put(*values[bundle[0]])
                continue
            location = Location(ray.put(tuple(values[i][0] for i in bundle)))
            for index, i in enumerate(bundle):
                handles[i] = RayHandle(location, values[i][1], index)
        return [handles[i] for i in range(len(values))]

    def get_many(self, handles: Sequence[Handle]) -> list[object]:
        """Return the values of these handles, in order."""
        return fetch_many(handles)


@cache
def alone_bytes() -> int:
    """Return the size from which on a value is an object of its own.

    The nodes of the cluster are counted once per process.
    """
    nodes = sum(node.alive for node in cluster_nodes())
    return BUNDLE_BYTES if nodes == 1 else ALONE_BYTES


def _bundles(sizes: Sequence[int], alone: int) -> list[list[int]]:
    """Return the indices of the values that become one object.

    A value of `alone` bytes or more is one object. Smaller ones are put together, in order, up to
    `BUNDLE_BYTES`. With alone = 16 MB and bundles of 64 MB:

        sizes   [30 MB, 15 MB, 15 MB, 70 MB, 15 MB, 15 MB, 15 MB]
        result  [[3], [0], [1, 2, 4, 5], [6]]
    """
    bundles: list[list[int]] = []
    # In the example, MB that are free in the last bundle after each value:
    #   size    30  15  15  70  15  15  15
    #   room     0  49  34  34  19   4  49      the last value does not fit into 4: a new bundle
    room = 0
    for i, size in enumerate(sizes):
        if size >= alone:
            # In front, so that the last bundle is the one that still has room.
            bundles.insert(0, [i])
        elif bundles and size <= room:
            bundles[-1].append(i)
            room -= size
        else:
            bundles.append([i])
            room = BUNDLE_BYTES - size
    return bundles


class Result:
    """The first return of a task: a value whose handles point to `location`."""

    __slots__ = ("location", "value")

    def __init__(self, value: object, location: Location) -> None:
        self.value = value
        self.location = location

    def __reduce__(self) -> tuple[object, ...]:
        return Result, (self.value, self.location)


class ResultStore(RayStore):
    """The store of one result: collects fields until the result itself is complete."""

    def __init__(self) -> None:
        self._location = Location()
        self._fields: list[object] = []
        self._nbytes = 0

    def put_many(self, values: Sequence[tuple[object, int]]) -> list[Handle]:
        """Keep small values for the object of the result; put large ones at once."""
        return [self._keep(value, nbytes) for value, nbytes in values]

    def _keep(self, value: object, nbytes: int) -> Handle:
        # Fields of 40, 20 and 10 MiB:
        #   one node         40 and 20 are kept; with 10 it would be 70 > 64, so 10 is put at once
        #   several nodes    40 and 20 are at least ALONE_BYTES and are put at once; 10 is kept
        if nbytes >= alone_bytes() or self._nbytes + nbytes > BUNDLE_BYTES:
            return self.put(value, nbytes)
        self._fields.append(value)
        self._nbytes += nbytes
        return RayHandle(self._location, nbytes, len(self._fields) - 1)

    def returns(self, value: object, apart: bool) -> tuple[object, object]:
        """Return the first and the second return of the task.

        The second is None without `apart`, and if the fields are small: those are put here.
        """
        if not self._fields:
            # Bytes are always a pickle (see `opened`), so a user's bytes are pickled as well.
            plain = type(value) is bytes or is_plain_batch(value)
            return pickle.dumps(value) if plain else value, None
        #   bytes of the fields   apart    first return            second   owner of the fields
        #         409 600         False    Result, location set    None     the worker
        #          40 960         True     Result, location set    None     the worker
        #         409 600         True     Result, location None   fields   the caller
        fields, result = tuple(self._fields), Result(value, self._location)
        if apart and self._nbytes >= RETURNED_BYTES:
            return result, fields
        self._location.ref = ray.put(fields)
        return result, None


def opened(returned: object, fields: Ref | None) -> object:
    """Return the value of a task.

    `returned`: its first return. `fields`: the reference to its second return, None if the task
    had one return.
    """
    if type(returned) is bytes:
        return pickle.loads(returned)
    if not isinstance(returned, Result):
        return returned
    if returned.location.ref is None:
        # All handles of these fields share one `Location`, also after unpickling: pickle writes an
        # object once and refers to it from then on. One assignment completes them all.
        returned.location.ref = fields
    return returned.value


def packed_batch(value: object) -> Message | None:
    """Return `value` if it is a packed batch, else None."""
    # While a process has not loaded this module, no value can be a packed batch.
    module = sys.modules.get("quadriga.protocol.message")
    if module is None or type(value) is not module.Message:
        return None
    return cast("Message", value)


def is_plain_batch(value: object) -> bool:
    """Return whether a packed value is a batch of small fields, without references or objects.

    Python's own pickler takes less than half the time of Ray's for such a batch: Ray's calls Python
    for every object, to find references and code that must be sent.
    """
    batch = packed_batch(value)
    return batch is not None and batch.is_plain
