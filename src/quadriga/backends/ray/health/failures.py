"""Ray's errors as ours, and what a failure does to the peers of the rank that failed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

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

from quadriga.backends.ray.cluster import fetch
from quadriga.backends.ray.health.nodes import actor_alive
from quadriga.backends.ray.health.stacks import in_collective, last_lines, stacks_of
from quadriga.errors import (
    CallTimeoutError,
    QuadrigaError,
    WorkerDiedError,
    WorkerError,
    WorkerMethodError,
)
from quadriga.single_controller.backend import RankHandle, RankSet

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import Ref

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


class FailedCall:
    """A call that one rank has failed: find the failure that explains the others.

    A rank that dies makes its peers fail in a collective, and their errors may arrive first. So the
    others get a grace, and a death counts before an error, an early error before a late one.
    """

    def __init__(
        self,
        refs: Sequence[Ref],
        handles: Sequence[RankHandle],
        fields: Sequence[Sequence[Ref]],
        label: str,
    ) -> None:
        """`refs`, `handles`, `fields`: of each rank, as in `waiting.RayBatch`."""
        self._refs = list(refs)
        self._handles = handles
        self._fields = fields
        self._label = label
        self.killed: list[RankHandle] = []
        """Peers that were stuck in a collective."""

    def first_failure(self, index: int, error: RayError) -> QuadrigaError:
        """Return the failure that came first, with a note on the peers that have not ended.

        `index`: the rank for which Ray has `error`. Peers stuck in a collective are killed.
        """
        failures, running = self._failures(GRACE_S)
        if not failures:
            failures = [translate(error, self._handles[index], self._label)]
        first = min(failures, key=_order)
        if not isinstance(first, WorkerDiedError) and _from_collective(first):
            failures, running = self._await_death()
            first = min([*failures, first], key=_order)
        note = self._release(running) if running else ""
        if note:
            first.args = (f"{first.args[0]}\n\n{note}",)
        return first

    def not_sent(self, failed: RankHandle, error: Exception, ranks: RankSet) -> WorkerError:
        """Return the error for a call that this object's ranks received and one rank did not.

        `.remote()` of the rank `failed` raised `error`: the queue of its actor is full, or this
        process has left the cluster. This counts as a failure of that rank: the others run the call
        to its end, and those that wait for the rank in a collective are killed.
        """
        running: list[RankHandle] = []
        if self._refs:
            _, running = self._failures(GRACE_S)
        note = self._release(running) if running else ""
        role, _, method = self._label.rpartition(".")
        facts = failed.facts
        first = f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"
        cause = f"{self._label} could not be sent to rank {facts.rank} on {facts.node}: {first}"
        if self.killed:
            killed = ", ".join(str(handle.facts.rank) for handle in self.killed)
            ranks.broken = f"rank(s) {killed} were killed in a collective after {cause}"
        received = ", ".join(str(handle.facts.rank) for handle in self._handles) or "none"
        return WorkerError(
            f"{cause}. Rank(s) that received the call: {received}.\n\n{note}".rstrip(),
            role=role,
            rank=facts.rank,
            node=facts.node,
            method=method,
        )

    def _failures(self, grace: float) -> tuple[list[QuadrigaError], list[RankHandle]]:
        """Return the failures so far, and the ranks that still run the call."""
        ray.wait(self._refs, num_returns=len(self._refs), timeout=grace, fetch_local=False)
        failures: list[QuadrigaError] = []
        running: list[RankHandle] = []
        for i, (ref, handle) in enumerate(zip(self._refs, self._handles, strict=True)):
            try:
                fetch([ref], timeout=0)
            except GetTimeoutError:
                running.append(handle)
            except RayError as found:
                failures.append(translate(found, handle, self._label))
                self._read_failure_of_fields(i)
        return failures, running

    def _read_failure_of_fields(self, index: int) -> None:
        """Read the other returns of a failed task: Ray logs errors that no process reads."""
        for fields in self._fields[index] if self._fields else ():
            with suppress(RayError):
                fetch([fields], timeout=0)

    def _await_death(self) -> tuple[list[QuadrigaError], list[RankHandle]]:
        """Wait until Ray knows of a dead peer, after a collective has failed."""
        deadline = time.monotonic() + DEATH_GRACE_S
        while True:
            failures, running = self._failures(0.0)
            dead = [handle for handle in self._handles if not actor_alive(handle.native)]
            if dead and not any(isinstance(f, WorkerDiedError) for f in failures):
                failures.append(died(dead[0], self._label, "its process has ended"))
            if dead or time.monotonic() > deadline:
                return failures, running
            time.sleep(0.1)

    def _release(self, running: list[RankHandle]) -> str:
        """Kill peers that are stuck. Return a note on the peers."""
        self.killed = kill_stuck_peers(running)
        lines = []
        if self.killed:
            ranks = ", ".join(str(h.facts.rank) for h in self.killed)
            lines.append(f"Stuck in a collective and killed: rank(s) {ranks}.")
        others = [str(h.facts.rank) for h in running if h not in self.killed]
        if others:
            lines.append(f"Still running the same call: rank(s) {', '.join(others)}.")
        return "\n".join(lines)


def _order(error: QuadrigaError) -> tuple[int, float]:
    return (0 if isinstance(error, WorkerDiedError) else 1, getattr(error, "raised_at", 0.0))


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
    role, _, method = label.rpartition(".")
    facts = handle.facts
    details = {"role": role, "rank": facts.rank, "node": facts.node, "method": method}
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, QuadrigaError):
            return cause
        if isinstance(cause, RayError):
            return translate(cause, handle, label, in_rank=True)
        return WorkerMethodError(
            f"{type(cause).__name__} around {label}, rank {facts.rank} on {facts.node}: "
            f"{_first_line(cause)}. The rank could not read the arguments or pickle the result, or "
            "the method raised what is no `Exception`.",
            remote_traceback=str(error),
            **details,
        )
    if isinstance(error, RaySystemError):
        place = f"rank {facts.rank} on {facts.node}"
        what = (
            f"An argument of {label} could not be read by {place}"
            if in_rank
            else f"A result of {label} from {place} could not be read by this process"
        )
        return WorkerMethodError(
            f"{what}: {_last_line(error)}", remote_traceback=str(error), **details
        )
    if isinstance(error, DEAD):
        return died(handle, label, _reason(error))
    return WorkerMethodError(
        f"{type(error).__name__} around {label}, rank {facts.rank} on {facts.node}: {error}",
        remote_traceback="",
        **details,
    )


def died(handle: RankHandle, label: str, reason: str) -> WorkerDiedError:
    """Return the error for a process that has ended, with its last lines of output.

    `label`: "role.method", with an empty method if the rank was idle.
    """
    role, _, method = label.rpartition(".")
    facts = handle.facts
    doing = f"{method} was in flight" if method else "it was idle"
    return WorkerDiedError(
        f"The process of {role} rank {facts.rank} on {facts.node} (pid {facts.pid}) ended while "
        f"{doing}: {reason}\n\nIts last lines:\n{last_lines(handle)}",
        role=role,
        rank=facts.rank,
        node=facts.node,
        method=method,
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


def _last_line(error: RayError) -> str:
    """Return the last line of a traceback, which is the error itself."""
    return str(error).strip().splitlines()[-1].strip()


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else "no message"


def cancelled(source: str, handle: RankHandle | None = None) -> WorkerMethodError:
    """Return the error for a result that was dropped. `source`: "role.method", and the rank."""
    if handle is None:
        return WorkerMethodError(f"The result of {source} was cancelled.", remote_traceback="")
    role, _, method = source.rpartition(".")
    rank, node = handle.facts.rank, handle.facts.node
    return WorkerMethodError(
        f"The result of {source}, rank {rank} on {node}, was cancelled. The rank runs the call.",
        remote_traceback="",
        role=role,
        rank=rank,
        node=node,
        method=method,
    )


def is_returned(ref: Ref) -> bool:
    """Return whether a task has returned or raised; False if it runs or its process has ended."""
    try:
        fetch([ref], timeout=0)
    except (GetTimeoutError, *DEAD):
        return False
    except RayError:
        return True
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
    role, _, method = label.rpartition(".")
    first = stuck[0]
    return CallTimeoutError(
        f"{label} exceeded its deadline of {timeout:g} s; still running on rank(s) "
        f"{places(stuck)}.\n\n{shown}",
        role=role,
        rank=first.facts.rank,
        node=first.facts.node,
        method=method,
        stacks=stacks,
    )
