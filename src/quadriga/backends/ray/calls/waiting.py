"""Waiting for results of ranks: the first failure of any of them ends the wait.

    RayBatch       the results of one submission, in the process that submitted it
    RayPending     one of those results; pickled, it becomes a result that another process waits for
    wait_for       waits for several of both kinds at once

A wait first asks Ray for everything at once, which is all that a short call needs. After
`FIRST_WAIT_S` it goes on in slices:

    1. `ray.wait(fetch_local=False)`: which results exist? Small ones and errors are read at once.
    2. `ray.wait(fetch_local=True)`: pull the large ones from their nodes. Ray goes on with such a
       pull between two slices, while `ray.get(timeout=…)` would cancel it at every slice.
    3. Look at deadlines, at watched groups and, after `PROBE_S`, at the nodes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from quadriga.backends.ray.calls.store import Result, opened
from quadriga.backends.ray.health.failures import DEAD, FailedCall, died
from quadriga.backends.ray.health.nodes import NodeProbe
from quadriga.backends.ray.health.stacks import stacks_of
from quadriga.backends.ray.process.memory import collect_in_wait
from quadriga.errors import CallTimeoutError, QuadrigaError, WorkerDiedError
from quadriga.single_controller.backend import RankHandle, RankSet
from quadriga.single_controller.watch import broken_groups, raise_if_broken

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import Ref

logger = logging.getLogger("quadriga.controller")

FIRST_WAIT_S = 0.2
"""How long a wait asks Ray for everything at once, before it goes on in slices."""
SLICE_S = 0.5
"""Length of a slice: how long a failure of one rank may go unnoticed while others run."""
MIN_SLICE_S = 0.01
PROBE_S = 2.0
"""How often a wait asks the nodes."""
LOG_S = 60.0
"""How often a long wait logs which ranks it waits for."""


class Awaited(Protocol):
    """Some results that are waited for together."""

    expires: float | None
    """When the deadline is, as `time.monotonic()`."""
    values: list[object] | None
    """What `keep` made of the values, None before."""

    @property
    def refs(self) -> list[Ref]:
        """What Ray is asked for."""

    def raise_failure(self, index: int, error: RayError) -> NoReturn:
        """Raise the error for result `index`, for which Ray has `error`."""

    def raise_if_late(self) -> None:
        """Raise CallTimeoutError if a result is missing at the deadline."""

    def look(self) -> None:
        """Check the ranks, and log what is waited for. Called once a slice."""

    def keep(self, values: list[object]) -> None:
        """Keep the values, in the order of `refs`."""


class RayBatch:
    """The results of one submission, one per rank.

    Consumes: the references of the tasks. Waits for: every rank, the first failure, the deadline,
    or a watched group that breaks. Unblocked by: any of these.
    """

    def __init__(
        self,
        refs: list[Ref],
        handles: Sequence[RankHandle],
        label: str,
        timeout: float | None = None,
        ranks: RankSet | None = None,
        fields: Sequence[Ref | None] = (),
    ) -> None:
        """Args:
        refs: first return of each task.
        handles: the rank of each task.
        label: "role.method", for messages.
        timeout: seconds from now to CallTimeoutError.
        ranks: the group; it is marked as broken if ranks had to be killed.
        fields: second return of each task, None for a task with one.
        """
        self.refs = refs
        self.handles = handles
        self.label = label
        self.timeout = timeout
        self.ranks = ranks
        self.fields = fields
        self.values: list[object] | None = None
        self.started = self._logged = self._probed = time.monotonic()
        self.expires = None if timeout is None else self.started + timeout
        self._probe: NodeProbe | None = None

    def gather(self) -> list[object]:
        """Return all values in order; wait for them once.

        Raise WorkerMethodError if a method raised, WorkerDiedError if a process has ended,
        CallTimeoutError if the deadline is exceeded.
        """
        if self.values is None:
            wait_for([self])
        assert self.values is not None
        return self.values

    def waits_for(self, handle: RankHandle) -> bool:
        """Return whether the result of that rank is missing, because it runs or has died."""
        for ref, mine in zip(self.refs, self.handles, strict=True):
            if mine is handle and self.values is None:
                return not _is_returned(ref)
        return False

    def keep(self, values: list[object]) -> None:
        """Open what the tasks returned, and note which methods have large fields."""
        for i, returned in enumerate(values):
            if isinstance(returned, Result):
                self.handles[i].methods[self.label].has_large_fields = True
            values[i] = opened(returned, self.fields[i] if self.fields else None)
        self.values = values

    def raise_failure(self, index: int, error: RayError) -> NoReturn:
        """Raise the failure that came first, of all that are known after a short grace."""
        call = FailedCall(self.refs, self.handles, self.fields, self.label)
        first = call.first_failure(index, error)
        if call.killed and self.ranks is not None:
            cause = str(first).splitlines()[0]
            ranks = ", ".join(str(h.facts.rank) for h in call.killed)
            self.ranks.broken = f"rank(s) {ranks} were killed in a collective after {cause}"
        raise first from getattr(first, "cause", None)

    def raise_if_late(self) -> None:
        """Raise CallTimeoutError with the stacks of the ranks that still run the call."""
        stuck = self._unfinished()
        if not stuck:
            return  # the last result arrived at this moment
        stacks = stacks_of(stuck)
        shown = "\n\n".join(f"Stack of rank {rank}:\n{stack}" for rank, stack in stacks.items())
        role, _, method = self.label.rpartition(".")
        first = stuck[0]
        raise CallTimeoutError(
            f"{self.label} exceeded its deadline of {self.timeout:g} s; still running on rank(s) "
            f"{_places(stuck)}.\n\n{shown}",
            role=role,
            rank=first.facts.rank,
            node=first.facts.node,
            method=method,
            stacks=stacks,
        )

    def look(self) -> None:
        """Raise WorkerDiedError if the node of a running rank is lost; log a long wait."""
        now = time.monotonic()
        if now - self._probed >= PROBE_S:
            self._probed = now
            self._raise_if_node_lost()
        if now - self._logged >= LOG_S:
            self._logged = now
            waited, places = now - self.started, _places(self._unfinished())
            logger.warning("waiting for %s on rank(s) %s for %.0f s", self.label, places, waited)

    def _raise_if_node_lost(self) -> None:
        # Made here and not in `__init__`, because most calls end before they need one.
        self._probe = self._probe or NodeProbe(self.handles)
        lost = self._probe.lost()
        if lost:
            unfinished = {id(handle) for handle in self._unfinished()}
            for handle in lost:
                if id(handle) in unfinished:
                    raise died(handle, self.label, "its node does not respond")

    def _unfinished(self) -> list[RankHandle]:
        done, _ = ray.wait(self.refs, num_returns=len(self.refs), timeout=0, fetch_local=False)
        finished = set(done)
        return [
            handle
            for ref, handle in zip(self.refs, self.handles, strict=True)
            if ref not in finished
        ]


class RayPending:
    """One rank's result.

    In the process that made the call it knows the batch, so that a failure of any peer ends the
    wait. Pickled, it carries the reference, the name of its source and what is left of the
    deadline.
    """

    __slots__ = ("batch", "expires", "fields", "index", "ref", "source", "values")

    def __init__(
        self,
        ref: Ref,
        fields: Ref | None = None,
        batch: RayBatch | None = None,
        index: int = 0,
        source: str = "",
        left: float | None = None,
    ) -> None:
        """Args:
        ref: first return of the task.
        fields: second return of the task, None if it has one.
        batch: the submission, None in another process.
        index: position in the batch.
        source: "role.method, rank r on node", for messages where the batch is not known.
        left: seconds until the deadline of the call, None without a deadline.
        """
        self.ref = ref
        self.fields = fields
        self.batch = batch
        self.index = index
        self.source = source
        self.expires = None if left is None else time.monotonic() + left
        self.values: list[object] | None = None
        """The value, once it was waited for, where the batch is not known."""

    @property
    def refs(self) -> list[Ref]:
        """The reference, as a list of one."""
        return [self.ref]

    @property
    def arrived(self) -> object:
        """The value if it was waited for before, else None."""
        known = self.values if self.batch is None else self.batch.values
        return None if known is None else known[self.index]

    def result(self) -> object:
        """Wait for the value. Raise what the worker raised."""
        if self.batch is not None:
            return self.batch.gather()[self.index]
        if self.values is None:
            wait_for([self])
        assert self.values is not None
        return self.values[0]

    def done(self) -> bool:
        """Return whether the value, or the error instead of it, exists."""
        known = self.values if self.batch is None else self.batch.values
        return known is not None or bool(ray.wait(self.refs, timeout=0, fetch_local=False)[0])

    def cancel(self) -> bool:
        """Drop the call if its rank has not started it. Return False if the result exists."""
        if self.done():
            return False
        ray.cancel(self.ref)
        return True

    @staticmethod
    def wait_all(pendings: Sequence[RayPending], timeout: float | None = None) -> None:
        """Wait until every value is known. The first failure of any of them is raised.

        Raise CallTimeoutError after `timeout` seconds; the calls go on.
        """
        awaited: list[Awaited] = list({id(p.batch or p): p.batch or p for p in pendings}.values())
        if timeout is not None and any(a.values is None for a in awaited):
            awaited.append(_Limit(timeout))
        wait_for(awaited)

    def keep(self, values: list[object]) -> None:
        """Open the value. Used where the batch is not known."""
        self.values = [opened(values[0], self.fields)]

    def raise_failure(self, index: int, error: RayError) -> NoReturn:
        """Raise the worker's error, or WorkerDiedError that names the source."""
        if isinstance(error, RayTaskError) and isinstance(error.cause, QuadrigaError):
            raise error.cause from error
        if isinstance(error, DEAD):
            raise WorkerDiedError(
                f"An argument is the result of {self.source}, whose process has ended."
            ) from error
        raise error

    def raise_if_late(self) -> None:
        """Raise CallTimeoutError if the result does not exist at the deadline of its call."""
        if not ray.wait(self.refs, timeout=0, fetch_local=False)[0]:
            raise CallTimeoutError(
                f"An argument is the result of {self.source}, which exceeded its deadline."
            )

    def look(self) -> None:
        """Check nothing: this process knows nothing of the rank."""

    def __reduce__(self) -> tuple[object, ...]:
        source, expires = self.source, self.expires
        if self.batch is not None:
            facts = self.batch.handles[self.index].facts
            source = f"{self.batch.label}, rank {facts.rank} on {facts.node}"
            expires = self.batch.expires
        left = None if expires is None else max(0.0, expires - time.monotonic())
        return RayPending, (self.ref, self.fields, None, 0, source, left)


class _Limit:
    """Ends a wait after some seconds: what `get(timeout=…)` of a future adds to its results."""

    def __init__(self, timeout: float) -> None:
        self.expires: float | None = time.monotonic() + timeout
        self.values: list[object] | None = None
        self.refs: list[Ref] = []
        self._timeout = timeout

    def raise_failure(self, index: int, error: RayError) -> NoReturn:
        """Raise the error; there is no result that could fail."""
        raise error

    def raise_if_late(self) -> None:
        """Raise CallTimeoutError."""
        raise CallTimeoutError(
            f"The future has no result after {self._timeout:.3g} s. The call goes on."
        )

    def look(self) -> None:
        """Check nothing."""

    def keep(self, values: list[object]) -> None:
        """Keep nothing."""


def wait_for(awaited: Sequence[Awaited]) -> None:
    """Wait until all results are known. Raise the first failure of any of them.

    Raise CallTimeoutError at the earliest deadline, and the error of a watched group that breaks.
    """
    missing = [a for a in awaited if a.values is None]
    refs = [ref for a in missing for ref in a.refs]
    try:
        values = ray.get(refs, timeout=_until_deadline(missing, FIRST_WAIT_S)) if refs else []
    except (GetTimeoutError, RayError) as error:
        found = _Slices(missing, refs, error).wait()
        values = [found[ref] for ref in refs]
    start = 0
    for a in missing:
        a.keep(values[start : start + len(a.refs)])
        start += len(a.refs)


def _until_deadline(awaited: Sequence[Awaited], seconds: float) -> float:
    expires = [a.expires for a in awaited if a.expires is not None]
    return max(0.0, min([seconds, *(at - time.monotonic() for at in expires)]))


class _Slices:
    """A wait in slices. Consumes: references. Waits for: all of them. Unblocked by: the last value,
    the first failure, a deadline, a lost node, a watched group that breaks."""

    def __init__(self, awaited: Sequence[Awaited], refs: list[Ref], error: RayError) -> None:
        """`error`: why the first attempt to get all of `refs` ended."""
        self._awaited = awaited
        self._home = {ref: (a, i) for a in awaited for i, ref in enumerate(a.refs)}
        self._running = list(dict.fromkeys(refs))
        self._remote: list[Ref] = []
        """Results that exist and that are being pulled from another node."""
        self._values: dict[Ref, object] = {}
        self._failed = None if isinstance(error, GetTimeoutError) else error
        self._began = time.monotonic()

    def wait(self) -> dict[Ref, object]:
        """Return the value of every reference."""
        if self._failed is not None:
            self._take_running(0.0)  # finds which one failed
        while self._running or self._remote:
            # A result that exists is received even if its pull ends after the deadline.
            pause = max(MIN_SLICE_S, _until_deadline(self._awaited, SLICE_S))
            self._take_running(pause)
            self._pull(0.0 if self._running else pause)
            if self._running or self._remote:
                self._look()
        return self._values

    def _take_running(self, timeout: float) -> None:
        if self._running:
            ready, self._running = ray.wait(
                self._running,
                num_returns=len(self._running),
                timeout=timeout,
                fetch_local=False,
            )
            self._remote += self._read(ready)

    def _pull(self, timeout: float) -> None:
        if self._remote:
            local, self._remote = ray.wait(
                self._remote, num_returns=len(self._remote), timeout=timeout, fetch_local=True
            )
            self._remote += self._read(local)

    def _read(self, refs: list[Ref]) -> list[Ref]:
        """Read what can be read now; return the references of the rest."""
        try:
            self._values.update(zip(refs, ray.get(refs, timeout=0), strict=True))
            return []
        except GetTimeoutError:
            if len(refs) == 1:
                return refs
        except RayError as error:
            if len(refs) == 1:
                home, index = self._home[refs[0]]
                home.raise_failure(index, error)
        # Some of several failed or are on another node: find out which.
        return [rest for ref in refs for rest in self._read([ref])]

    def _look(self) -> None:
        if broken_groups:
            raise_if_broken()
        now = time.monotonic()
        collect_in_wait(now - self._began)
        for awaited in self._awaited:
            if awaited.expires is not None and now >= awaited.expires:
                awaited.raise_if_late()
            awaited.look()


def _is_returned(ref: Ref) -> bool:
    """Return whether a task has returned or raised; False if it runs or its process died."""
    try:
        ray.get(ref, timeout=0)
    except (GetTimeoutError, *DEAD):
        return False
    except RayError:
        return True
    return True


def _places(handles: Sequence[RankHandle]) -> str:
    return ", ".join(f"{h.facts.rank} ({h.facts.node}, pid {h.facts.pid})" for h in handles)
