"""Waiting for the ranks of one call: the first failure ends it, and says who failed first."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayError

from quadriga.backends.ray.calls.results import Reply, opened
from quadriga.backends.ray.health.failures import DEAD, died, order_of_failure, translate
from quadriga.backends.ray.health.liveness import actor_alive
from quadriga.backends.ray.health.nodes import NodeProbe
from quadriga.backends.ray.health.stacks import in_collective, stacks_of
from quadriga.errors import CallTimeoutError, WorkerDiedError, WorkerError
from quadriga.single_controller.backend import RankHandle, RankSet
from quadriga.single_controller.watch import raise_if_broken

logger = logging.getLogger("quadriga.controller")

LOOK_S = 1.0
"""How often a wait looks up."""
PROBE_S = 2.0
"""How often it asks the nodes."""
SPEAK_S = 60.0
"""How often a long wait says whom it waits for."""
GRACE_S = 0.5
"""How long after a failure others may still turn out to have failed first."""
DEATH_GRACE_S = 3.0
"""The same when the failure came from a collective: a peer's death is the likely cause, and
Ray may learn of it later than the collective does."""
STUCK_S = 2.0
"""A peer that stands at one place of a collective for this long is stuck there."""


@dataclass(eq=False)
class RayBatch:
    """The answers of one submission. Consumes: the refs. Waits for: every rank, the first
    failure, the deadline, or a watched group that breaks. Unblocked by: any of these."""

    refs: list[Any]
    handles: Sequence[RankHandle]
    label: str
    timeout: float | None = None
    """Seconds from the submission to CallTimeoutError."""
    ranks: RankSet | None = None
    fields: Sequence[Any] = ()
    """The second return of each task, None for those without."""
    started: float = field(default_factory=time.monotonic)
    values: list[Any] | None = None

    def gather(self) -> list[Any]:
        """All values in order, waited for once.

        Raises WorkerMethodError (a method raised), WorkerDiedError (a process is gone) or
        CallTimeoutError (the deadline has passed).
        """
        if self.values is None:
            self.values = self._wait()
        return self.values

    def waits_for(self, handle: RankHandle) -> bool:
        """Whether the answer of that rank is still to come, or died with it."""
        for ref, mine in zip(self.refs, self.handles, strict=True):
            if mine is handle and self.values is None:
                return not self._answered(ref)
        return False

    @staticmethod
    def _answered(ref: Any) -> bool:
        try:
            ray.get(ref, timeout=0)
        except (GetTimeoutError, *DEAD):
            return False
        except RayError:
            return True
        return True

    def _wait(self) -> list[Any]:
        spoken = probed = self.started
        probe = NodeProbe(self.handles)
        while True:
            try:
                return self._opened(ray.get(self.refs, timeout=self._look_for()))
            except GetTimeoutError:
                now = time.monotonic()
                raise_if_broken()
                if self.timeout is not None and now - self.started >= self.timeout:
                    self._raise_if_late(self.timeout)
                if now - probed >= PROBE_S:
                    probed = now
                    self._raise_if_node_lost(probe)
                if now - spoken >= SPEAK_S:
                    spoken = now
                    self._say_whom(now - self.started)
            except RayError as error:
                self._raise_first(error)

    def _opened(self, replies: list[Any]) -> list[Any]:
        for i, reply in enumerate(replies):
            if isinstance(reply, Reply):
                self.handles[i].methods[self.label].has_large_fields = True
            replies[i] = opened(reply, self._fields_of(i))
        return replies

    def _fields_of(self, index: int) -> Any:
        return self.fields[index] if self.fields else None

    def _look_for(self) -> float:
        if self.timeout is None:
            return LOOK_S
        return min(LOOK_S, max(0.0, self.started + self.timeout - time.monotonic()))

    def _unfinished(self) -> list[RankHandle]:
        done, _ = ray.wait(self.refs, num_returns=len(self.refs), timeout=0, fetch_local=False)
        finished = set(done)
        return [
            handle
            for ref, handle in zip(self.refs, self.handles, strict=True)
            if ref not in finished
        ]

    # The ways a wait ends badly

    def _raise_if_late(self, timeout: float) -> None:
        stuck = self._unfinished()
        if not stuck:
            return  # the last answer arrived at this moment
        stacks = stacks_of(stuck)
        shown = "\n\n".join(f"Stack of rank {rank}:\n{stack}" for rank, stack in stacks.items())
        role, _, method = self.label.rpartition(".")
        first = stuck[0]
        places = ", ".join(f"{h.facts.rank} ({h.facts.node}, pid {h.facts.pid})" for h in stuck)
        raise CallTimeoutError(
            f"{self.label} passed its deadline of {timeout:g} s; still running on rank(s) "
            f"{places}.\n\n{shown}",
            role=role,
            rank=first.facts.rank,
            node=first.facts.node,
            method=method,
            stacks=stacks,
        )

    def _raise_if_node_lost(self, probe: NodeProbe) -> None:
        unfinished = {id(handle) for handle in self._unfinished()}
        for handle in probe.lost():
            if id(handle) in unfinished:
                raise died(handle, self.label, "its node does not answer any more")

    def _say_whom(self, waited: float) -> None:
        waiting = ", ".join(
            f"{h.facts.rank} ({h.facts.node}, pid {h.facts.pid})" for h in self._unfinished()
        )
        logger.warning("waiting for %s on rank(s) %s for %.0f s", self.label, waiting, waited)

    def _raise_first(self, error: RayError) -> NoReturn:
        """Of all failures known after a short grace, raise the one that came first."""
        failures, running = self._failures(GRACE_S)
        if not failures:
            failures = [translate(error, self.handles[0], self.label)]
        first = min(failures, key=order_of_failure)
        if not isinstance(first, WorkerDiedError) and _from_collective(first):
            failures, running = self._await_death()
            first = min([*failures, first], key=order_of_failure)
        note = self._release(running, first) if running else ""
        if note:
            first.args = (f"{first.args[0]}\n\n{note}",)
        raise first from getattr(first, "cause", None)

    def _failures(self, grace: float) -> tuple[list[WorkerError], list[RankHandle]]:
        """What has failed by now, and who still runs the call."""
        ray.wait(self.refs, num_returns=len(self.refs), timeout=grace, fetch_local=False)
        failures: list[WorkerError] = []
        running: list[RankHandle] = []
        for i, (ref, handle) in enumerate(zip(self.refs, self.handles, strict=True)):
            try:
                ray.get(ref, timeout=0)
            except GetTimeoutError:
                running.append(handle)
            except RayError as found:
                failures.append(translate(found, handle, self.label))
                self._read_failure_of_fields(i)
        return failures, running

    def _read_failure_of_fields(self, index: int) -> None:
        """A task fails in all of its returns, and Ray logs those that nobody has read."""
        fields = self._fields_of(index)
        if fields is not None:
            with suppress(RayError):
                ray.get(fields, timeout=0)

    def _await_death(self) -> tuple[list[WorkerError], list[RankHandle]]:
        """A collective failed: give a dead peer time to be known as dead."""
        deadline = time.monotonic() + DEATH_GRACE_S
        while True:
            failures, running = self._failures(0.0)
            dead = [handle for handle in self.handles if not actor_alive(handle.native)]
            for handle in dead:
                if not any(isinstance(f, WorkerDiedError) for f in failures):
                    failures.append(died(handle, self.label, "its process is gone"))
            if dead or time.monotonic() > deadline:
                return failures, running
            time.sleep(0.1)

    def _release(self, running: list[RankHandle], first: WorkerError) -> str:
        """End peers that are stuck in a collective, which the failed rank will never join."""
        before = stacks_of(running)
        suspects = [h for h in running if in_collective(before[h.facts.rank])]
        stuck: list[RankHandle] = []
        if suspects:
            time.sleep(STUCK_S)
            after = stacks_of(suspects)
            stuck = [h for h in suspects if after[h.facts.rank] == before[h.facts.rank]]
        for handle in stuck:
            ray.kill(handle.native)
        lines = []
        if stuck:
            ranks = ", ".join(str(h.facts.rank) for h in stuck)
            lines.append(f"Stuck in a collective and cancelled: rank(s) {ranks}.")
            if self.ranks is not None:
                self.ranks.broken = (
                    f"rank(s) {ranks} were cancelled in a collective after "
                    f"{str(first).splitlines()[0]}"
                )
        others = [str(h.facts.rank) for h in running if h not in stuck]
        if others:
            lines.append(f"Still running the same call: rank(s) {', '.join(others)}.")
        return "\n".join(lines)


def _from_collective(error: WorkerError) -> bool:
    text = f"{error} {getattr(error, 'remote_traceback', '')}".lower()
    return any(word in text for word in ("gloo", "nccl", "torch.distributed", "torch/distributed"))
