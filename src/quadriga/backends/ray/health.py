"""Whether ranks and their nodes are alive, what a stuck rank does, and Ray's errors as ours.

Ray's record of an actor decides whether a rank is alive. A node that fails is noticed sooner than
by Ray's health check, which takes up to a minute: its raylet's port is probed. One failed probe
proves nothing (a dropped packet, a long pause); see `lost_nodes`.

A rank that is stuck cannot run a method, so its stack is asked for by a signal. `faulthandler`
responds in C code, also while the thread holds the interpreter or waits inside a system call:

    controller ──► task on the rank's node ──SIGUSR2──► rank process writes its stack file
                                           ◄── reads what was added to the stack file

A failure also decides what happens to the peers of the rank that failed.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayError,
    RaySystemError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quadriga.backends.ray.cluster import (
    STACK_SIGNAL,
    RayNode,
    RemoteMethod,
    cluster_nodes,
    kill_with_children,
    this_node,
)
from quadriga.backends.ray.store import fetch
from quadriga.errors import (
    CallTimeoutError,
    ClusterLostError,
    QuadrigaError,
    WorkerDiedError,
    WorkerError,
    WorkerMethodError,
    first_line,
)
from quadriga.single_controller.backend import RankHandle, RankSet

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from quadriga.backends.ray.cluster import Ref

T = TypeVar("T")
Probe = Literal["open", "refused", "silent"]
"""What a node's port does: it accepts a connection, refuses it, or does not respond."""

PROBE_TIMEOUT_S = 1.5
PROBE_THREADS = 128
FAILED_PROBES = 3
"""How many probes in a row must fail before a node can be lost."""
LOST_AFTER_S: Mapping[Probe, float] = {"refused": 3.0, "silent": 10.0}
"""For how long they must have failed. A refused connection means that the host is up and its raylet
has ended; silence may be a pause of the network."""
JOINED_LOST_AFTER_S: Mapping[Probe, float] = {"refused": 40.0, "silent": 45.0}
"""The same for the control store of a cluster of the user, which may start it again."""
NODE_WAIT_S = 8.0
"""How long a function on another node may take."""
_DEAD = 4
"""`ActorTableData.DEAD` in Ray's `gcs.proto`."""
NO_RESPONSE = "  (its node does not respond)"


# Actors


def dead_ranks(handles: Sequence[RankHandle]) -> list[RankHandle]:
    """Return those of many ranks whose process has ended: Ray knows of a death or the node is lost.

    A node is probed once for all its ranks.
    """
    if cluster_lost():
        return list(handles)
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
    from ray._private import state

    record: dict[str, object] = dict(state.actors(actor._actor_id.hex()) or {})
    return record.get("State") not in (None, "DEAD")


# Nodes


_failing: dict[str, tuple[float, int]] = {}
"""Node id → since when its probes fail, and how many have. Shared by all waits and watches of this
process, so that each probe counts."""
_failing_lock = threading.Lock()


def _is_lost(name: str, probe: Probe | None, after: Mapping[Probe, float] = LOST_AFTER_S) -> bool:
    """Note a probe; return whether they have failed for long enough. `name`: of a node."""
    now = time.monotonic()
    with _failing_lock:
        if probe is None or probe == "open":
            _failing.pop(name, None)
            return probe is None
        since, failed = _failing.get(name, (now, 0))
        _failing[name] = since, failed + 1
        return failed + 1 >= FAILED_PROBES and now - since >= after[probe]


def cluster_lost() -> str:
    """Return why no call can be made any more, after one probe of the control store and of the
    raylet of this node; "" while both accept connections. Callers ask again every few seconds. The
    end of one that this process has started is known at once.

    After 60 s without a control store, Ray ends this process and all ranks.
    """
    node = ray._private.worker._global_node
    if node is None:
        return ""
    store, _, port = node.gcs_address.rpartition(":")
    after = LOST_AFTER_S if node.head else JOINED_LOST_AFTER_S
    for what, kind, address, number, patience in (
        ("control store (GCS)", "gcs_server", store.strip("[]"), int(port), after),
        ("raylet of this node", "raylet", node.node_ip_address, node.node_manager_port,
         LOST_AFTER_S),
    ):  # fmt: skip
        if any(info.process.poll() is not None for info in node.all_processes.get(kind, ())):
            return f"the {what} of Ray at {address}:{number} has ended"
        probe = _probe(RayNode("", address, number, True, {}))
        if _is_lost(f"{what} of {node.session_name}", probe, patience):
            return f"the {what} of Ray at {address}:{number} accepts no connections"
    return ""


def lost_nodes(node_ids: Iterable[str]) -> set[str]:
    """Return those of these nodes that are lost, after one probe of each.

    A node is lost if Ray's control store has recorded its death, or if at least three probes in a
    row have failed for the time in `LOST_AFTER_S`. Callers ask again every few seconds.
    """
    return {name for name, probe in probe_nodes(node_ids).items() if _is_lost(name, probe)}


def probe_nodes(node_ids: Iterable[str]) -> dict[str, Probe | None]:
    """Return for each node what its port does; None if Ray has recorded the node's death.

    The node of this process is always "open".
    """
    mine = this_node()
    others = set(node_ids) - {mine, ""}
    result: dict[str, Probe | None] = {mine: "open"}
    if not others:
        return result
    result.update(dict.fromkeys(others))
    known = [node for node in cluster_nodes() if node.alive and node.node_id in others]
    with ThreadPoolExecutor(max(1, min(len(known), PROBE_THREADS))) as threads:  # all at once
        for node, probe in zip(known, threads.map(_probe, known), strict=True):
            result[node.node_id] = probe
    return result


def _probe(node: RayNode) -> Probe:
    try:
        socket.create_connection((node.address, node.port), PROBE_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return "silent"
    return "open"


def end_own_processes() -> None:
    """Kill the processes of Ray that this process has started, with their children. A cluster that
    the user has started is left alone."""
    node = ray._private.worker._global_node
    if node is None or not node.head:
        return
    for info in chain.from_iterable(node.all_processes.values()):
        kill_with_children(info.process.pid)


# Functions on a rank's node


def on_node_of(
    handles: Sequence[RankHandle], function: Callable[[T], str], argument: Callable[[RankHandle], T]
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


RANK_HOST = "single_controller/rank_host.py"
WAIT_S = 2.0
NOTHING_RUNS = "  (no method of a worker is running)"
LAST_LINES = 20
LAST_BYTES = 64 * 1024
"""How much of the end of a log file is read."""

COLLECTIVES = (
    "torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py",
    "torch/distributed/rendezvous.py", "torch/distributed/nn/functional.py",
    "torch/distributed/tensor/_collective_utils.py",
    "torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
    "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", "ray/util/collective/",
)  # fmt: skip
"""Files whose functions wait for other ranks. Other files of `torch/distributed` compute, or write
checkpoints to a disk that may be slow."""
_LOCAL_STEPS = ("_object_to_tensor", "_tensor_to_object")
"""Functions of those files that pickle, and wait for no other rank."""
_WRAPPERS = (
    "torch/distributed/c10d_logger.py", "torch/utils/_contextlib.py", "torch/_ops.py",
    "torch/_compile.py", "torch/_dynamo/eval_frame.py",
)  # fmt: skip
"""Files whose frames stand between a collective and the code that called it."""


def stacks_of(handles: Sequence[RankHandle]) -> dict[int, str]:
    """Return for each rank the stack of the thread that runs a call, innermost frame first.

    A coroutine that waits is on the stack of no thread. The event loop of its rank is free, and is
    asked by an ordinary call where its coroutines wait.
    """
    stacks = on_node_of(handles, dump, lambda h: (h.facts.pid, h.facts.stack_path))
    idle = [h for h in handles if stacks[h.facts.rank] == NOTHING_RUNS]
    asked = {
        h.native.quadriga_coroutines.remote(): h.facts.rank
        for h in idle
        if hasattr(h.native, "quadriga_coroutines")
    }
    if asked:
        for ref in ray.wait(list(asked), num_returns=len(asked), timeout=WAIT_S)[0]:
            stacks[asked[ref]] = text_of(ref) or NOTHING_RUNS
    return stacks


def in_collective(stack: str) -> bool:
    """Return whether the innermost function of a stack waits for other ranks.

    For `dist.all_reduce` that is frame 0 here:

        File ".../torch/distributed/distributed_c10d.py", line 2810 in all_reduce
        File ".../torch/distributed/c10d_logger.py", line 81 in wrapper
        File ".../my_worker.py", line 12 in update_actor
    """
    for line in stack.splitlines():
        if any(wrapper in line for wrapper in _WRAPPERS):
            continue
        return any(file in line for file in COLLECTIVES) and not line.endswith(_LOCAL_STEPS)
    return False


def last_lines(handle: RankHandle) -> str:
    """Return what a rank's process wrote to its stderr last."""
    texts = on_node_of([handle], tail, lambda h: h.facts.log_path)
    return texts[handle.facts.rank] or "  (no log)"


def dump(process: tuple[int, str]) -> str:
    """Make a process of this node write its stacks, and read them.

    `process`: its process id and the path of its stack file.
    """
    pid, path = process
    try:
        before = os.path.getsize(path)
        os.kill(pid, STACK_SIGNAL)
    except OSError as error:
        return f"  (process {pid} cannot be asked: {error})"
    deadline = time.monotonic() + WAIT_S
    size = before
    try:
        # The dump is complete when the file has grown and then stays as it is for 50 ms.
        while time.monotonic() < deadline:
            time.sleep(0.05)
            grown = os.path.getsize(path)
            if grown > before and grown == size:
                break
            size = grown
        with open(path, errors="replace") as file:
            file.seek(before)
            return running_thread(file.read()) or f"  (process {pid} does not respond)"
    except OSError as error:
        return f"  (process {pid} has ended: {error})"


def running_thread(text: str) -> str:
    """Return, of a dump of all threads, the one that runs a worker's method, down to that method.

    "" for an empty dump.
    """
    for thread in text.strip().split("\n\n"):
        lines = thread.splitlines()
        inside = [i for i, line in enumerate(lines) if RANK_HOST in line]
        if inside:
            return "\n".join(lines[1 : inside[0]] or lines)
    return NOTHING_RUNS if text.strip() else ""


def tail(path: str | None) -> str:
    """Return the last 20 lines of a file of this node, without the markers that Ray writes.

    Only the last 64 KiB are read.
    """
    if not path or not os.path.exists(path):
        return "  (no log)"
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - LAST_BYTES)
        file.seek(start)
        text = file.read().decode(errors="replace")
    lines = text.splitlines()[1 if start else 0 :] or text.splitlines()
    shown = [line.rstrip() for line in lines if not line.startswith(":")]
    return "\n".join("  " + line for line in shown[-LAST_LINES:]) or "  (nothing)"


DEAD = (ActorDiedError, ActorUnavailableError, WorkerCrashedError)
GRACE_S = 0.5
"""How long after a failure other ranks may still report that they failed earlier."""
DEATH_GRACE_S = 3.0
"""The same if a collective failed. The likely cause is the death of a peer, and Ray may learn of
that death later than the collective does."""
SHOWN_RANKS = 16
"""How many ranks a message lists."""
STUCK_S = 2.0
"""A peer that is at one place of a collective for this long is stuck there."""


@dataclass(eq=False)
class SentCall:
    """One submission, with one task per rank. If a rank fails, it finds the failure that explains
    those of others.

    A rank that dies makes its peers fail in a collective, and their errors may arrive first. So the
    others get a grace, and a death counts before an error, an early error before a late one.
    """

    refs: list[Ref]
    """First return of each task."""
    handles: Sequence[RankHandle] = ()
    """The rank of each task; none for results of a call of another process."""
    label: str = ""
    """"role.method", for messages; where the ranks are not known with rank and node."""
    ranks: RankSet | None = None
    """The group, whose later calls fail if peers had to be killed."""
    fields: Sequence[Sequence[Ref]] = ()
    """The returns of fields of each task; may be left out if no task has one."""

    def first_failure(self, index: int, error: RayError) -> QuadrigaError:
        """Return the failure that came first, with a note on the peers that have not ended.

        `index`: the rank for which Ray has `error`. Peers stuck in a collective are killed.
        """
        failures, running = self._failures(GRACE_S)
        if not failures:
            failures = [translate(error, self.handles[index], self.label)]
        first = min(failures, key=_order)
        if not isinstance(first, WorkerDiedError) and _from_collective(first):
            failures, running = self._await_death()
            first = min([*failures, first], key=_order)
        if running:
            note = self._release(running, first_line(first))
            first.args = (f"{first.args[0]}\n\n{note}",)
        return first

    def not_sent(self, failed: RankHandle, error: Exception) -> WorkerError:
        """Return the error for a call that this object's ranks received and one rank did not.

        `.remote()` of the rank `failed` raised `error`: the queue of its actor is full, or this
        process has left the cluster. This counts as a failure of that rank: the others run the call
        to its end, and those that wait for the rank in a collective are killed.
        """
        running: list[RankHandle] = []
        if self.refs:
            _, running = self._failures(GRACE_S)
        first = f"{type(error).__name__}: {first_line(error)}"
        place = f"rank {failed.facts.rank} on {failed.facts.node}"
        cause = f"{self.label} could not be sent to {place}: {first}"
        note = self._release(running, cause) if running else ""
        received = ", ".join(str(handle.facts.rank) for handle in self.handles) or "none"
        return WorkerError(
            f"{cause}. Rank(s) that received the call: {received}.\n\n{note}".rstrip(),
            **details(failed, self.label),
        )

    def _failures(self, grace: float) -> tuple[list[QuadrigaError], list[RankHandle]]:
        """Return the failures so far, and the ranks that still run the call."""
        ray.wait(self.refs, num_returns=len(self.refs), timeout=grace, fetch_local=False)
        failures: list[QuadrigaError] = []
        running: list[RankHandle] = []
        for i, (ref, handle) in enumerate(zip(self.refs, self.handles, strict=True)):
            try:
                fetch([ref], timeout=0)
            except GetTimeoutError:
                running.append(handle)
            except RayError as found:
                failures.append(translate(found, handle, self.label))
                # The other returns too: Ray logs errors that no process reads.
                for fields in self.fields[i] if self.fields else ():
                    with suppress(RayError):
                        fetch([fields], timeout=0)
        return failures, running

    def _await_death(self) -> tuple[list[QuadrigaError], list[RankHandle]]:
        """Wait until Ray knows of a dead peer, after a collective has failed."""
        deadline = time.monotonic() + DEATH_GRACE_S
        while True:
            failures, running = self._failures(0.0)
            dead = [handle for handle in self.handles if not actor_alive(handle.native)]
            if dead and not any(isinstance(f, WorkerDiedError) for f in failures):
                failures.append(died(dead[0], self.label, "its process has ended"))
            if dead or time.monotonic() > deadline:
                return failures, running
            time.sleep(0.1)

    def _release(self, running: list[RankHandle], cause: str) -> str:
        """Kill peers that are stuck. Return a note on the peers, of which there is at least one."""
        killed = kill_stuck_peers(running)
        lines = []
        if killed:
            ranks = ", ".join(str(h.facts.rank) for h in killed)
            lines.append(f"Stuck in a collective and killed: rank(s) {ranks}.")
            if self.ranks is not None:
                self.ranks.broken = f"rank(s) {ranks} were killed in a collective after {cause}"
        others = [str(h.facts.rank) for h in running if h not in killed]
        if others:
            lines.append(f"Still running the same call: rank(s) {', '.join(others)}.")
        return "\n".join(lines)


def _order(error: QuadrigaError) -> tuple[int, float]:
    return (0 if isinstance(error, WorkerDiedError) else 1, getattr(error, "raised_at", 0.0))


def details(handle: RankHandle, label: str) -> dict[str, Any]:  # as the errors declare them
    """Return the attributes of an error about one call of one rank. `label`: "role.method"."""
    role, _, method = label.rpartition(".")
    return {"role": role, "rank": handle.facts.rank, "node": handle.facts.node, "method": method}


def translate(
    error: RayError, handle: RankHandle, label: str, in_rank: bool = False
) -> QuadrigaError:
    """Return our error for one of Ray's.

    Args:
        error: what `ray.get` raised.
        handle: the rank whose task it was.
        label: "role.method".
        in_rank: the rank raised it, and not this process.
    """
    place, remote = f"rank {handle.facts.rank} on {handle.facts.node}", str(error)
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, QuadrigaError):
            return cause
        if isinstance(cause, RayError):
            return translate(cause, handle, label, in_rank=True)
        text = (
            f"{type(cause).__name__} around {label}, {place}: {first_line(cause)}. The rank could "
            "not read the arguments or pickle the result, or the method raised what is no "
            "`Exception`."
        )
    elif isinstance(error, DEAD):
        return died(handle, label, _reason(error))
    elif isinstance(error, RaySystemError):
        last_line = remote.strip().splitlines()[-1].strip()  # of a traceback: the error itself
        text = f"A result of {label} from {place} could not be read by this process: {last_line}"
        if in_rank:
            text = f"An argument of {label} could not be read by {place}: {last_line}"
    else:
        text, remote = f"{type(error).__name__} around {label}, {place}: {error}", ""
    return WorkerMethodError(text, remote_traceback=remote, **details(handle, label))


def died(handle: RankHandle, label: str, reason: str) -> WorkerDiedError | ClusterLostError:
    """Return the error for a process that has ended, with its last lines of output, or the one for
    the whole cluster if that has ended.

    `label`: "role.method", with an empty method if the rank was idle.
    """
    known, facts = details(handle, label), handle.facts
    if lost := cluster_lost():
        node = ray._private.worker._global_node
        text = f"{known['method'] or 'A call'} cannot end: {lost}"
        return ClusterLostError(text, own=node is not None and node.head, **known)
    if facts.node_id and probe_nodes([facts.node_id])[facts.node_id] in ("refused", None):
        reason = (
            "its node is lost: the raylet there has ended"  # Ray names its worker, or the owner
        )
    doing = f"{known['method']} was in flight" if known["method"] else "it was idle"
    return WorkerDiedError(
        f"The process of {known['role']} rank {facts.rank} on {facts.node} (pid {facts.pid}) ended "
        f"while {doing}: {reason}\n\nIts last lines:\n{last_lines(handle)}",
        **known,
    )


def _from_collective(error: QuadrigaError) -> bool:
    """Return whether a collective reported the error, which a peer's death may have caused."""
    text = f"{error} {getattr(error, 'remote_traceback', '')}".lower()
    return any(word in text for word in ("gloo", "nccl", "torch.distributed", "torch/distributed"))


def kill_stuck_peers(running: Sequence[RankHandle]) -> list[RankHandle]:
    """Kill the ranks that wait in a collective which a failed rank will never join; return them.

    No exception reaches a thread inside a collective, which ends after its own timeout (half an
    hour by default). A rank is stuck if two stacks, two seconds apart, show the same place.
    """
    before = stacks_of(running)
    suspects = [h for h in running if in_collective(before[h.facts.rank])]
    if not suspects:
        return []
    time.sleep(STUCK_S)
    after = stacks_of(suspects)
    stuck = [h for h in suspects if after[h.facts.rank] == before[h.facts.rank]]
    for handle in stuck:
        ray.kill(handle.native)
    return stuck


def _reason(error: RayError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    chosen = [line for line in lines if "exit" in line.lower() or "killed" in line.lower()]
    text = " ".join(chosen[:2]) if chosen else (lines[0] if lines else type(error).__name__)
    # Ray appends a list of everything that can end a process; the lines of the log say more.
    return text.partition(" Some common causes include")[0]


def cancelled(source: str, handle: RankHandle | None = None) -> WorkerMethodError:
    """Return the error for a result that was dropped. `source`: "role.method", and the rank."""
    if handle is None:
        return WorkerMethodError(f"The result of {source} was cancelled.", remote_traceback="")
    place = f"rank {handle.facts.rank} on {handle.facts.node}"
    text = f"The result of {source}, {place}, was cancelled. The rank runs the call."
    return WorkerMethodError(text, remote_traceback="", **details(handle, source))


def is_returned(ref: Ref) -> bool:
    """Return whether a task has returned or raised; False if it runs or its process has ended."""
    try:
        fetch([ref], timeout=0)
    except RayError as error:
        return not isinstance(error, (GetTimeoutError, *DEAD))
    return True


def places(handles: Sequence[RankHandle]) -> str:
    """Return rank, node and process id of each rank, for a message."""
    shown = [f"{h.facts.rank} ({h.facts.node}, pid {h.facts.pid})" for h in handles[:SHOWN_RANKS]]
    more = len(handles) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def late(label: str, timeout: float | None, stuck: Sequence[RankHandle]) -> CallTimeoutError:
    """Return the error for ranks that still run a call at its deadline, with their stacks.

    `label`: "role.method". `timeout`: seconds.
    """
    stacks = stacks_of(stuck)
    shown = "\n\n".join(f"Stack of rank {rank}:\n{stack}" for rank, stack in stacks.items())
    return CallTimeoutError(
        f"{label} exceeded its deadline of {timeout:g} s; still running on rank(s) "
        f"{places(stuck)}.\n\n{shown}",
        stacks=stacks,
        **details(stuck[0], label),
    )
