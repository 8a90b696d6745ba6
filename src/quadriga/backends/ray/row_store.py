"""A store on Ray whose readers on other nodes fetch rows without the rest of their objects.

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

import copy
import logging
import math
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quadriga.backends.ray.cluster import cluster_nodes, fetch, kill_actor, this_node
from quadriga.backends.ray.store import RayHandle, RayStore, item_of
from quadriga.errors import ConfigError
from quadriga.protocol.storage import (
    Ints,
    RowRequest,
    Stored,
    current_store,
    cut,
    payload_bytes,
    traffic,
)

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import ActorFactory, RankActor, Ref

logger = logging.getLogger("quadriga.data")

StoreName = Literal["auto", "rows", "shards"]
SHARE = 1 / 8
"""The part of a remote shard up to which "auto" cuts. A whole object that one rank fetches serves
all ranks of its node, so the parts of all of them count:

    nodes   ranks of each   part of one rank   of its node    "auto"
        2               8               1/16           1/2    whole shards
       16               8              1/128          1/16    rows
        8               1                1/8           1/8    rows
"""
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


class RowHandleOnRay(RayHandle):
    """A handle of `RowStore`: a whole value, or some rows of it."""

    __slots__ = ()

    def pays(self, share: float) -> bool:
        """Return whether the store of this process cuts `share` of the rows out of the shard."""
        store = current_store()
        return isinstance(store, RowStore) and store.cuts(self.location.node, share)

    @staticmethod
    def fetch_rows(requests: Sequence[RowRequest]) -> list[object | None]:
        """Ask the row server of each node once; None for rows that it could not send."""
        by_node: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            assert isinstance(request.handle, RowHandleOnRay)
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
                traffic.cut(payload_bytes(payload))
        return found


def _ask(node: str, requests: Sequence[RowRequest]) -> Ref | None:
    """Send one request to the row server of a node, None if it has no row server."""
    server = servers.of(node)
    if server is None:
        return None
    numbers: dict[Ref, int] = {}
    cuts: list[Cut] = []
    for request in requests:
        handle = request.handle
        assert isinstance(handle, RowHandleOnRay)
        cuts.append((numbers.setdefault(handle.ref, len(numbers)), handle.index, request.rows))
    # In a list, the references are not fetched to the row server before its method runs.
    return server.cut.remote(list(numbers), cuts)


class RowStore(RayStore):
    """Put values into Ray's object store, and have rows of remote values cut out by their node.

    Args:
        share: cut if the ranks of the reading node need at most this part of the rows of a shard.
        near: cut also on the node of the reader, where reading shared memory is cheaper. It lets
            a cluster of one node test what several nodes do.
    """

    handle_class = RowHandleOnRay

    def __init__(self, share: float = SHARE, near: bool = False) -> None:
        self.share = share
        self.near = near
        self.readers = 1
        """How many ranks of this group read on this node."""
        self._node = ""
        self._looked = -math.inf  # when the nodes were counted

    def node(self) -> str:
        """Return the id of this node; "" in a cluster of one node, which has no other reader.

        Nodes may join, so that a cluster of one node is looked at again after `LOOK_S` seconds.
        """
        if not self._node and time.monotonic() - self._looked > LOOK_S:
            self._looked = time.monotonic()
            alone = sum(node.alive for node in cluster_nodes()) == 1
            self._node = "" if alone and not self.near else this_node()
        return self._node

    def __copy__(self) -> RowStore:
        return RowStore(self.share, self.near)

    def cuts(self, node: str, share: float) -> bool:
        """Return whether to cut `share` of the rows out of a shard of that node."""
        few = share * self.readers <= self.share
        return few and bool(node) and (self.near or node != self.node())

    def __reduce__(self) -> tuple[object, ...]:
        return RowStore, (self.share, self.near)


def make_store(name: StoreName | RayStore) -> RayStore:
    """Return the store of a setting, or a new one like a given store.

    Raises `ConfigError` for an unknown name.

    "auto": `RowStore` with `SHARE`. "rows": rows are always cut on other nodes. "shards": whole
    objects are always fetched.
    """
    if isinstance(name, RayStore):
        return copy.copy(name)
    if name == "auto":
        return RowStore()
    if name == "rows":
        return RowStore(math.inf)
    if name == "shards":
        return RayStore()
    raise ConfigError(
        f'store={name!r}: expected "auto", "rows" or "shards". "auto" fetches a few rows of '
        "another node without the rest of their shards, and whole shards otherwise.",
        key="store",
    )


# Row servers


def serve_rows(store: RayStore, nodes: Iterable[str]) -> None:
    """Start the row servers of these nodes and of this one, if readers with this store ask them."""
    if isinstance(store, RowStore) and store.node():
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
    """The row servers that this process knows, by node. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[str, RankActor] = {}
        self._missing: dict[str, float] = {}
        self._started: list[RankActor] = []
        self._lock = threading.Lock()

    def of(self, node: str) -> RankActor | None:
        """Return the row server of a node, None if there is none."""
        name = _name(node)
        with self._lock:
            if name in self._known:
                return self._known[name]
            if time.monotonic() < self._missing.get(name, 0.0):
                return None
        try:
            server = cast("RankActor", ray.get_actor(name, namespace=_NAMESPACE))
        except ValueError:  # Ray's error for an unknown name
            with self._lock:
                self._missing[name] = time.monotonic() + LOOK_UP_AGAIN_S
            return None
        with self._lock:
            self._known[name] = server
        return server

    def forget(self, node: str) -> None:
        """Do not ask the row server of a node for a while: it may hang, and readers would wait."""
        with self._lock:
            self._known.pop(_name(node), None)
            self._missing[_name(node)] = time.monotonic() + LOOK_UP_AGAIN_S

    def stop(self) -> None:
        """End the row servers that this process has started. Whole objects are fetched then."""
        with self._lock:
            started, self._started = self._started, []
            self._known.clear()
        with ExitStack() as stack:  # all are ended before an error of one is raised
            for server in reversed(started):
                stack.callback(kill_actor, server)

    def start(self, nodes: Iterable[str]) -> None:
        """Start the row servers of nodes that have none. They end with this driver."""
        for node in nodes:
            name = _name(node)
            with self._lock:
                if name in self._known:
                    continue
            factory = cast("ActorFactory", ray.remote(RowServer))
            server = factory.options(
                num_cpus=0,
                max_restarts=-1,
                max_concurrency=THREADS,
                name=name,
                namespace=_NAMESPACE,
                get_if_exists=True,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            ).remote()
            with self._lock:
                self._known[name] = server
                self._started.append(server)
                self._missing.pop(name, None)


servers = Servers()


def _name(node: str) -> str:
    """Return the name of a row server. A job has its own: it ends with the driver of the job."""
    return f"{ray.get_runtime_context().get_job_id()}_{node}"
