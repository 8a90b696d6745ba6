"""Whether ranks and their nodes are alive, and running a small function on a rank's own node.

Ray's record of an actor decides whether a rank is alive. A node that fails is noticed sooner than
by Ray's health check, which takes up to a minute: its raylet's port is probed. One failed probe
proves nothing (a dropped packet, a long pause); see `lost_nodes`.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar, cast

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quadriga.backends.ray.cluster import RayNode, RemoteMethod, cluster_nodes, this_node
from quadriga.single_controller.backend import RankHandle

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from quadriga.backends.ray.cluster import Ref

T = TypeVar("T")
Probe = Literal["open", "refused", "silent"]
"""What a node's port does: it accepts a connection, refuses it, or does not respond."""

PROBE_TIMEOUT_S = 1.5
FAILED_PROBES = 3
"""How many probes in a row must fail before a node can be lost."""
LOST_AFTER_S: Mapping[Probe, float] = {"refused": 3.0, "silent": 10.0}
"""For how long they must have failed. A refused connection means that the host is up and its raylet
has ended; silence may be a pause of the network."""
NODE_WAIT_S = 8.0
"""How long a function on another node may take."""
_DEAD = 4
"""`ActorTableData.DEAD` in Ray's `gcs.proto`."""
NO_RESPONSE = "  (its node does not respond)"


# Actors


def rank_alive(handle: RankHandle) -> bool:
    """Return whether the rank's process exists: Ray knows of no death and its node is not lost."""
    return actor_alive(handle.native) and not lost_nodes([handle.facts.node_id])


def dead_ranks(handles: Sequence[RankHandle]) -> list[RankHandle]:
    """Return those of many ranks that are not alive; a node is probed once for all its ranks."""
    dead = [handle for handle in handles if not actor_alive(handle.native)]
    if dead or not ray.is_initialized():
        return dead
    lost = lost_nodes({handle.facts.node_id for handle in handles})
    return [handle for handle in handles if handle.facts.node_id in lost] if lost else []


def actor_alive(actor: ActorHandle[object]) -> bool:
    """Return True while an actor is being started or runs; False if this process left Ray.

    A process that holds a handle is subscribed to the actor's state, so no message is sent.
    """
    if not ray.is_initialized():
        return False
    core = getattr(ray._private.worker.global_worker, "core_worker", None)
    state_of = getattr(core, "get_local_actor_state", None)
    local = None if state_of is None else state_of(actor._actor_id)
    if local is not None:
        return bool(local != _DEAD)
    return actor_record(actor).get("State") not in (None, "DEAD")


def actor_record(actor: ActorHandle[object]) -> dict[str, object]:
    """Return the record of Ray's control store: State, Address, DeathCause, …; {} if unknown."""
    from ray._private import state

    return dict(state.actors(actor._actor_id.hex()) or {})


# Nodes


@dataclass
class _Failing:
    """A node whose probes fail."""

    since: float
    probes: int = 0


_failing: dict[str, _Failing] = {}
"""By node id. Shared by all waits and watches of this process, so that each probe counts."""
_failing_lock = threading.Lock()


def lost_nodes(node_ids: Iterable[str]) -> set[str]:
    """Return those of these nodes that are lost, after one probe of each.

    A node is lost if Ray's control store has recorded its death, or if at least three probes in a
    row have failed for the time in `LOST_AFTER_S`. Callers ask again every few seconds.
    """
    probes = probe_nodes(node_ids)
    lost = {node_id for node_id, probe in probes.items() if probe is None}
    now = time.monotonic()
    with _failing_lock:
        for node_id, probe in probes.items():
            if probe is None or probe == "open":
                _failing.pop(node_id, None)
                continue
            failing = _failing.setdefault(node_id, _Failing(now))
            failing.probes += 1
            if failing.probes >= FAILED_PROBES and now - failing.since >= LOST_AFTER_S[probe]:
                lost.add(node_id)
    return lost


def probe_nodes(node_ids: Iterable[str]) -> dict[str, Probe | None]:
    """Return for each node what its port does; None if Ray has recorded the node's death.

    The node of this process is always "open".
    """
    mine = this_node()
    others = set(node_ids) - {mine, ""}
    result: dict[str, Probe | None] = {mine: "open"}
    if not others:
        return result
    known = {node.node_id: node for node in cluster_nodes() if node.alive}
    result.update(dict.fromkeys(others))
    result.update(_connect([known[node_id] for node_id in others if node_id in known]))
    return result


def _connect(nodes: Sequence[RayNode]) -> dict[str, Probe]:
    """Connect to all nodes at once, in this thread: a thousand nodes take some milliseconds."""
    result: dict[str, Probe] = {}
    with selectors.DefaultSelector() as selector:
        try:
            for node in nodes:
                family = socket.AF_INET6 if ":" in node.address else socket.AF_INET
                sock = socket.socket(family, socket.SOCK_STREAM)
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_WRITE, node.node_id)
                try:
                    code = sock.connect_ex((node.address, node.port))
                except OSError:  # the name of the host is not known
                    code = errno.EHOSTUNREACH
                if code not in (0, errno.EINPROGRESS):
                    result[node.node_id] = _meaning(code)
                    selector.unregister(sock)
                    sock.close()
            deadline = time.monotonic() + PROBE_TIMEOUT_S
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    connected = cast(socket.socket, key.fileobj)
                    code = connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    result[key.data] = _meaning(code)
                    selector.unregister(connected)
                    connected.close()
        finally:
            for key in list(selector.get_map().values()):
                result.setdefault(key.data, "silent")
                cast(socket.socket, key.fileobj).close()
    return result


def _meaning(code: int) -> Probe:
    if code == 0:
        return "open"
    return "refused" if code == errno.ECONNREFUSED else "silent"


class NodeProbe:
    """Find the ranks of one wait whose node is lost."""

    def __init__(self, handles: Sequence[RankHandle]) -> None:
        self._handles = handles
        self._node_ids = {handle.facts.node_id for handle in handles}

    def lost(self) -> list[RankHandle]:
        """Probe the nodes once; return the ranks whose node is lost."""
        lost = lost_nodes(self._node_ids)
        return [h for h in self._handles if h.facts.node_id in lost] if lost else []


# Functions on a rank's node


def on_node_of(
    handles: Sequence[RankHandle],
    function: Callable[[T], str],
    argument: Callable[[RankHandle], T],
) -> dict[int, str]:
    """Run `function(argument(handle))` on the node of each rank; return the texts by rank.

    The texts are in the order of `handles`. A node that does not respond within 8 seconds gives a
    text that says so.
    """
    mine = this_node()
    texts = {handle.facts.rank: NO_RESPONSE for handle in handles}
    remote: dict[int, Ref] = {}
    probes = probe_nodes(handle.facts.node_id for handle in handles)
    for handle in handles:
        facts = handle.facts
        if facts.node_id in (mine, ""):
            texts[facts.rank] = function(argument(handle))
        elif probes[facts.node_id] == "open":
            strategy = NodeAffinitySchedulingStrategy(facts.node_id, soft=False)
            task = cast(RemoteMethod, ray.remote(num_cpus=0, max_retries=0)(function))
            remote[facts.rank] = task.options(scheduling_strategy=strategy).remote(argument(handle))
    if remote:
        refs = list(remote.values())
        done = set(ray.wait(refs, num_returns=len(refs), timeout=NODE_WAIT_S)[0])
        texts.update({rank: text_of(ref) for rank, ref in remote.items() if ref in done})
    return texts


def text_of(ref: Ref) -> str:
    """Return the text that a node or a rank was asked for, or one that says that none came."""
    try:
        return str(ray.get(ref))
    except RayError:
        return NO_RESPONSE
