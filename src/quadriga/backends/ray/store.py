"""Ray's object store as the `Store` of the protocol, and the result of a rank's task.

    task of a rank ──► first return:   Result(value, locations)   the controller fetches it
                   ├─► second return:  fields                     readers fetch it, by handle
                   └─► third return:   fields                     …

**One object for a shard.** Every object costs its owner, and each process that holds a reference,
some tenths of a millisecond. The fields of one shard are therefore put together into one object.
On one node a reader maps shared memory and copies only the fields that it reads. To another node an
object is sent as a whole, so in a cluster of several nodes a field of `ALONE_BYTES` or more is an
object of its own: reading a small field never fetches a large one.

**Ownership.** A stored field belongs to the process that called, whether it was an argument or a
result, and it exists as long as that process and the node of its bytes. An object that a worker
puts would belong to the worker, so the fields of a result are returns of the task: they belong to
the caller from the start. A call asks for as many returns as its method has filled before:

    calls of one method                     returns   fields
    the first                               2         all in the second
    with 80 MiB of fields (two objects)     2         all in the second; the caller notes "two"
    the next one                            3         in the second and the third
    a method whose first result had none    1         in the first: the caller receives them once
    the next one                            2         in the second

**Rows of other nodes.** A store may fetch rows from other nodes without the rest of their
objects.

    reading rank ── rows 4, 17 of object A, row 3 of B ──► row server of the node of A and B
                 ◄──────── one object of three rows ────── reads shared memory, cuts

A row server is an actor without resources, one per node, which the controller starts with the first
group that has ranks there. It is not the rank that produced the rows: that rank may run the same
call, and two ranks that wait for rows of each other would wait for ever. It answers also after that
rank has ended.

Rows are cut out if the ranks of the reading node need a small part of a remote shard: at most
`share` of its rows. Otherwise, and whenever the row server cannot answer, the whole object is
fetched, which is always possible while its owner and its node run.
"""

from __future__ import annotations

import logging
import math
import pickle
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, TypeGuard, cast

import numpy as np
import ray
from ray.exceptions import RayError

from quadriga.backends.ray.cluster import actor_on_node, cluster_nodes, kill_actor, this_node
from quadriga.errors import ConfigError, LostObjectError
from quadriga.protocol.storage import (
    Handle,
    Ints,
    RowRequest,
    Stored,
    Transport,
    current_store,
    cut,
    payload_bytes,
    traffic,
    transports,
)

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import RankActor, Ref
    from quadriga.protocol.boundary import DataProtoFuture
    from quadriga.protocol.message import Message

logger = logging.getLogger("quadriga.data")

# Two float32 fields in a cluster of several nodes:
#   [1024, 4096]  16 777 216 bytes = ALONE_BYTES      an object of its own
#   [1024, 4095]  16 773 120 bytes < ALONE_BYTES      put together with other fields
ALONE_BYTES = 16 * 2**20
BUNDLE_BYTES = 64 * 2**20
"""Fields of one object are freed together, so an object holds no more than this on one node too."""
RETURNED_BYTES = 100 * 1024
"""Ray sends smaller returns through the memory of the caller. Fields are filled up to this size, so
that their bytes stay on the node of the rank."""

FETCH_S = 900.0
"""How long stored values may take to arrive. Ray itself gives up after ten minutes on a node that
it cannot reach, but not on one that sends too slowly."""

StoreName = Literal["auto", "rows", "shards"]
SHARE = 1 / 8
"""The part of a remote shard up to which "auto" cuts. A whole object that one rank fetches serves
all ranks of its node, so the parts of all of them count:

    nodes   ranks of each   part of one rank   of its node    "auto"
        2               8               1/16           1/2    whole shards
       16               8              1/128          1/16    rows
        8               1                1/8           1/8    rows
"""
_SHARES: dict[str, float] = {"auto": SHARE, "rows": math.inf, "shards": 0.0}
ANSWER_S = 60.0
"""How long a row server may take."""
LOOK_S = 10.0
"""Seconds after which the nodes of a cluster of one node are counted again."""
LOOK_UP_AGAIN_S = 30.0
"""How long a node without a row server is not asked again."""
THREADS = 4
"""How many requests a row server answers at the same time."""
_NAMESPACE = "quadriga_rows"

Cut = tuple[int, int, Ints]
"""Number of the object in the request, number of the field in the object, rows."""

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


def fetch(refs: Sequence[Ref], timeout: float | None = None) -> list[object]:
    """Return the values of references: `ray.get` for calls that may fail or be late.

    Ray raises an error in a frame whose variables refer to it. Such a cycle keeps what the calling
    frames refer to, batches too, until a full garbage collection, so that frame is left out.
    """
    try:
        return list(ray.get(list(refs), timeout=timeout))
    except RayError as error:
        error.__traceback__ = None
        raise


class Location:
    """Where an object is stored. `ref` is None while the object is a return of a running task: only
    the caller has that reference, and sets it when the result arrives (`opened`)."""

    __slots__ = ("node", "ref")

    def __init__(self, ref: Ref | None = None, node: str = "") -> None:
        self.ref = ref
        self.node = node
        """Ray's id of the node that stored it; "" if readers need not know."""

    def __reduce__(self) -> tuple[object, ...]:
        return Location, (self.ref, self.node) if self.node else (self.ref,)


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
        return f"{self.ref.hex()}:{self.index}"

    @property
    def sends_rows(self) -> bool:
        """Whether the node of the value is known: see `RayStore.node`."""
        return bool(self.location.node)

    def pays(self, share: float) -> bool:
        """Return whether the store of this process cuts `share` of the rows out of the shard."""
        store = current_store()
        return isinstance(store, RayStore) and store.cuts(self.location.node, share)

    def fetch(self) -> object:
        """Return the value. Raises `LostObjectError` if it is lost."""
        return self.fetch_many([self])[0]

    @staticmethod
    def fetch_many(handles: Sequence[RayHandle]) -> list[object]:
        """Return the values as views of shared memory, with one `ray.get` for all of them.

        Raises `LostObjectError` if one is lost because the process that owned it has ended, or if
        they do not arrive in a quarter of an hour.
        """
        # Two handles of object A and one of B: found = [A, A, B], and Ray is asked for [A, B].
        found = [handle.ref for handle in handles]
        refs = list(dict.fromkeys(found))
        try:
            # One long wait: short ones would cancel the transfers of large objects each time.
            objects = dict(zip(refs, ray.get(refs, timeout=FETCH_S), strict=True))
        except ray.exceptions.GetTimeoutError as error:
            here = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0])
            raise LostObjectError(
                f"{len(refs)} object(s) of Ray's store did not arrive within {FETCH_S:g} s.",
                late=[handle.key for handle in handles if handle.ref not in here],
            ) from error
        except _LOST as error:
            error.__traceback__ = None  # see `fetch`
            raise LostObjectError(f"An object of Ray's store is lost: {error}") from error
        return [
            item_of(objects[ref], handle.index) for ref, handle in zip(found, handles, strict=True)
        ]

    @staticmethod
    def fetch_rows(requests: Sequence[RowRequest]) -> list[object | None]:
        """Ask the row server of each node once; None for rows that it could not send."""
        by_node: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            assert isinstance(request.handle, RayHandle)
            by_node.setdefault(request.handle.location.node, []).append(number)
        asked = {
            node: (numbers, _ask(node, [requests[i] for i in numbers]))
            for node, numbers in by_node.items()
        }
        found: list[object | None] = [None] * len(requests)
        deadline = time.monotonic() + ANSWER_S
        for node, (numbers, answer) in asked.items():
            if answer is None:
                continue
            try:
                (payloads,) = fetch([answer], max(0.0, deadline - time.monotonic()))
            except RayError as error:  # GetTimeoutError is one
                logger.warning(
                    "The row server of node %s did not send rows (%s); whole objects are fetched.",
                    node,
                    type(error).__name__,
                )
                servers.forget(node)
                continue
            for i, payload in zip(numbers, cast("list[Stored]", payloads), strict=True):
                found[i] = payload
                traffic.add(cut_bytes=payload_bytes(payload))
        return found

    @property
    def ref(self) -> Ref:
        """The reference to the object. Raises `LostObjectError` before it is known."""
        if self.location.ref is None:
            raise LostObjectError("This field is part of a result that has not been received.")
        return self.location.ref

    def __reduce__(self) -> tuple[object, ...]:
        return RayHandle, (self.location, self.nbytes, self.index)


def item_of(stored: object, index: int) -> object:
    if index == _WHOLE:
        return stored
    fields = stored.fields if isinstance(stored, Result) else stored
    assert isinstance(fields, tuple)
    return fields[index]


class RayStore:
    """Put values into Ray's object store, and have rows of remote values cut out by their node.

    The process that puts a value owns it. A store is pickled as its settings.

    Args:
        share: cut if the ranks of the reading node need at most this part of the rows of a shard;
            0: whole objects are always fetched.
        near: cut also on the node of the reader, where reading shared memory is cheaper. It lets
            a cluster of one node test what several nodes do.
    """

    in_process = False

    def __init__(self, share: float = SHARE, near: bool = False) -> None:
        self.share = share
        self.near = near
        self.readers = 1
        """How many ranks of this group read on this node."""
        self._node = ""
        self._looked = -math.inf  # when the nodes were counted

    def node(self) -> str:
        """Return the id of this node; "" if no reader needs it: rows are never cut, or the cluster
        has one node.

        Nodes may join, so that a cluster of one node is looked at again after `LOOK_S` seconds.
        """
        if self.share and not self._node and time.monotonic() - self._looked > LOOK_S:
            self._looked = time.monotonic()
            alone = sum(node.alive for node in cluster_nodes()) == 1
            self._node = "" if alone and not self.near else this_node()
        return self._node

    def cuts(self, node: str, share: float) -> bool:
        """Return whether to cut `share` of the rows out of a shard of that node."""
        few = share * self.readers <= self.share
        return few and bool(node) and (self.near or node != self.node())

    def __reduce__(self) -> tuple[object, ...]:
        return RayStore, (self.share, self.near)

    @property
    def session(self) -> object:
        """The driver and the cluster whose objects this store keeps: equal for equal objects."""
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_job_id()

    def put(self, value: object, nbytes: int = 0) -> Handle:
        """Store one value as an object of its own."""
        return RayHandle(Location(ray.put(value), self.node()), nbytes)

    def put_many(self, values: Sequence[tuple[object, int]]) -> list[Handle]:
        """Store `(value, nbytes)` pairs, small values together; return the handles in order."""
        handles: dict[int, Handle] = {}
        for bundle in _bundles([nbytes for _, nbytes in values], alone_bytes()):
            if len(bundle) == 1:
                handles[bundle[0]] = self.put(*values[bundle[0]])
                continue
            location = Location(ray.put(tuple(values[i][0] for i in bundle)), self.node())
            for index, i in enumerate(bundle):
                handles[i] = RayHandle(location, values[i][1], index)
        return [handles[i] for i in range(len(values))]


def alone_bytes() -> int:
    """Return the size from which on a value is an object of its own.

    The nodes of a cluster are counted once per process.
    """
    return _alone_bytes(ray.get_runtime_context().get_node_id())


@cache
def _alone_bytes(node: str) -> int:
    """`node`: the id of this node, which differs between clusters."""
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


@dataclass(slots=True)
class Result:
    """The first return of a task: a value whose handles point to `locations`.

    `fields`: the fields themselves if the task had no return for them, else `()`. `objects`: how
    many returns the fields of this result fill.
    """

    value: object
    locations: Sequence[Location]
    objects: int
    fields: tuple[object, ...] = ()


class ResultStore:
    """The store of one result: collects fields until the result itself is complete."""

    in_process = False

    def __init__(self, store: RayStore) -> None:
        """`store`: the store of the rank, whose handles the result has."""
        self._store = store
        self._fields: list[tuple[object, RayHandle]] = []
        # No other result may use the handles of this one, which are complete in the caller only.
        self.session = object()

    def put(self, value: object, nbytes: int = 0) -> Handle:
        """Keep one value for the returns of the task."""
        handle = RayHandle(Location(), nbytes)
        self._fields.append((value, handle))
        return handle

    def put_many(self, values: Sequence[tuple[object, int]]) -> list[Handle]:
        """Keep values for the returns of the task."""
        return [self.put(value, nbytes) for value, nbytes in values]

    def returns(self, value: object, count: int) -> tuple[object, ...]:
        """Return the first return of the task and its `count` returns of fields.

        Returns of fields that this result does not fill are None.
        """
        if not self._fields:
            plain = is_plain_batch(value)
            return pickle.dumps(value) if plain else pickled_if_bytes(value), *[None] * count
        bundles = _bundles([handle.nbytes for _, handle in self._fields], alone_bytes())
        wanted = len(bundles)
        # Three bundles, two returns: the last two bundles become one object.
        places = max(count, 1)
        bundles[places - 1 :] = [[i for bundle in bundles[places - 1 :] for i in bundle]]
        objects = [self._object(bundle) for bundle in bundles if bundle]
        locations = [location for location, _ in objects]
        if not count:
            return (Result(value, locations, wanted, objects[0][1]),)
        result = Result(value, locations, wanted)
        return result, *[fields for _, fields in objects], *[None] * (count - len(objects))

    def _object(self, bundle: Sequence[int]) -> tuple[Location, tuple[object, ...]]:
        """Return the location of a new object, to which its handles point, and the object."""
        location = Location(node=self._store.node())
        nbytes = 0
        for index, i in enumerate(bundle):
            handle = self._fields[i][1]
            handle.location, handle.index = location, index
            nbytes += handle.nbytes
        missing = max(0, RETURNED_BYTES - nbytes)
        filling = (np.zeros(missing, dtype=np.uint8),) if missing else ()
        return location, (*[self._fields[i][0] for i in bundle], *filling)


def pickled_if_bytes(value: object) -> object:
    """Return the user's bytes as a pickle, and any other value itself.

    Ray returns such values as `bytes`, which are always a pickle of ours (see `opened`). A view of
    memory, which cannot be pickled, becomes its bytes.
    """
    if isinstance(value, memoryview):
        value = bytes(value)
    return pickle.dumps(value) if isinstance(value, bytes | bytearray) else value


def opened(returned: object, ref: Ref, fields: Sequence[Ref]) -> object:
    """Return the value of a task.

    `returned`: its first return. `ref`, `fields`: the references to its first return, and to its
    returns of fields.
    """
    if type(returned) is bytes:
        return pickle.loads(returned)
    if not isinstance(returned, Result):
        return returned
    # All handles of one object share one `Location`, also after unpickling: pickle writes an object
    # once and refers to it from then on. One assignment completes them all.
    for location, stored in zip(returned.locations, fields or (ref,), strict=False):
        location.ref = stored
    return returned.value


def packed_batch(value: object) -> Message | None:
    """Return `value` if it is a packed batch, else None."""
    # While a process has not loaded this module, no value can be a packed batch.
    module = sys.modules.get("quadriga.protocol.message")
    if module is None or type(value) is not module.Message:
        return None
    return cast("Message", value)


def is_future(value: object) -> TypeGuard[DataProtoFuture]:
    """Return whether `value` is a batch that ranks may still be computing."""
    module = sys.modules.get("quadriga.protocol.boundary")
    return module is not None and isinstance(value, module.DataProtoFuture)


def is_plain_batch(value: object) -> bool:
    """Return whether a packed value is a batch of small fields, without references or objects.

    Python's own pickler takes less than half the time of Ray's for such a batch: Ray's calls Python
    for every object, to find references and code that must be sent.
    """
    batch = packed_batch(value)
    return batch is not None and batch.data_bytes() is not None


# Row servers


def _ask(node: str, requests: Sequence[RowRequest]) -> Ref | None:
    """Send one request to the row server of a node, None if it has no row server."""
    server = servers.of(node)
    if server is None:
        return None
    numbers: dict[Ref, int] = {}
    cuts: list[Cut] = []
    for request in requests:
        handle = request.handle
        assert isinstance(handle, RayHandle)
        cuts.append((numbers.setdefault(handle.ref, len(numbers)), handle.index, request.rows))
    # In a list, the references are not fetched to the row server before its method runs.
    return server.cut.remote(list(numbers), cuts)


def make_store(name: StoreName | RayStore) -> RayStore:
    """Return the store of a setting, or a new one like a given store.

    Raises `ConfigError` for an unknown name.
    """
    if isinstance(name, RayStore):
        return RayStore(name.share, name.near)
    if name in _SHARES:
        return RayStore(_SHARES[name])
    raise ConfigError(
        f'store={name!r}: expected "auto", "rows" or "shards". "auto" fetches a few rows of '
        "another node without the rest of their shards, and whole shards otherwise.",
        key="store",
    )


def serve_rows(store: RayStore, nodes: Iterable[str]) -> None:
    """Start the row servers of these nodes and of this one, if readers with this store ask them."""
    if store.node():
        servers.start({*nodes, this_node()})


class RowServer:
    """The actor of one node that cuts rows out of objects that the node stores."""

    def cut(self, refs: Sequence[Ref], cuts: Sequence[Cut]) -> list[Stored]:
        """Return the payloads of the rows, in the order of `cuts`."""
        objects = fetch(refs, timeout=ANSWER_S)
        return [
            cut(cast("Stored", item_of(objects[number], index)), np.asarray(rows))
            for number, index, rows in cuts
        ]


class Servers:
    """The row servers that this process knows, by name.

    Several threads may use it: each change is one operation of a dict or a list, and two threads
    that start the server of a node get the same actor.
    """

    def __init__(self) -> None:
        self._known: dict[str, RankActor] = {}
        self._missing: dict[str, float] = {}
        """Name → when it may be looked up again."""
        self._started: list[RankActor] = []

    def of(self, node: str) -> RankActor | None:
        """Return the row server of a node, None if there is none."""
        name = _name(node)
        known = self._known.get(name)
        if known is not None or time.monotonic() < self._missing.get(name, 0.0):
            return known
        try:
            server = cast("RankActor", ray.get_actor(name, namespace=_NAMESPACE))
        except ValueError:  # Ray's error for an unknown name
            self._missing[name] = time.monotonic() + LOOK_UP_AGAIN_S
            return None
        self._known[name] = server
        return server

    def forget(self, node: str) -> None:
        """Do not ask the row server of a node for a while: it may hang, and readers would wait."""
        self._known.pop(_name(node), None)
        self._missing[_name(node)] = time.monotonic() + LOOK_UP_AGAIN_S

    def stop(self) -> None:
        """End the row servers that this process has started. Whole objects are fetched then."""
        started, self._started = self._started, []
        self._known.clear()
        with ExitStack() as stack:  # all are ended before an error of one is raised
            for server in reversed(started):
                stack.callback(kill_actor, server)

    def start(self, nodes: Iterable[str]) -> None:
        """Start the row servers of nodes that have none. They end with this driver."""
        options = {
            "max_restarts": -1, "max_concurrency": THREADS, "namespace": _NAMESPACE,
            "get_if_exists": True,
        }  # fmt: skip
        for node in nodes:
            name = _name(node)
            if name in self._known:
                continue
            self._known[name] = server = actor_on_node(RowServer, node, name=name, **options)
            self._started.append(server)
            self._missing.pop(name, None)


servers = Servers()


def _name(node: str) -> str:
    """Return the name of a row server. A job has its own: it ends with the driver of the job."""
    return f"{ray.get_runtime_context().get_job_id()}_{node}"
