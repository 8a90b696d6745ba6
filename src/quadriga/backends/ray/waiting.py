"""Waiting for results of ranks: the first failure of any of them ends the wait.

    RayBatch       the results of one submission, in the process that submitted it
    RayPending     one of those results; pickled, it becomes a result that another process waits for
    wait_for       waits for several of both kinds at once

A wait first asks Ray for everything at once, which is all that a short call needs. After
`FIRST_WAIT_S` it goes on in slices.

One slice of a long wait:

1. `ray.wait(fetch_local=False)`: which results exist? Small ones and errors are read at once.
2. `ray.wait(fetch_local=True)`: pull the large ones from their nodes. Ray goes on with such a
   pull between two slices, while `ray.get(timeout=…)` would cancel it at every slice.
3. Look at deadlines, at watched groups and, after `PROBE_S`, at the nodes.

Example: ranks 0, 1 and 2 return after 0.3, 0.7 and 1.2 s of the wait. The result of rank 1 is large
and on another node; its pull takes 0.6 s. Time is in seconds from the start of the slices:

    0.0 ─ 0.5   slice 1   rank 0 has returned, its value is read
    0.5 ─ 1.0   slice 2   rank 1 has returned, its value is remote: the pull starts at 1.0
    1.0 ─ 1.6   slice 3   rank 2 returns at 1.2; then only the pull is waited for, which ends at 1.6
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol, overload

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from quadriga.backends.ray.cluster import fetch
from quadriga.backends.ray.health import (
    DEAD,
    FailedCall,
    NodeProbe,
    cancelled,
    died,
    is_returned,
    late,
    places,
)
from quadriga.backends.ray.memory import collect_in_wait
from quadriga.backends.ray.store import opened
from quadriga.errors import CallTimeoutError, QuadrigaError, WorkerDiedError
from quadriga.protocol.threads import PendingValue
from quadriga.single_controller.backend import RankHandle, RankSet, broken_groups, raise_if_broken

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import Ref

SLICE_S = 0.5
"""Length of a slice: how long a failure of one rank may go unnoticed while others run."""
MIN_SLICE_S = 0.01


class Awaited(Protocol):
    """Some results that are waited for together."""

    label: str
    """Whose results they are, for messages."""
    expires: float | None
    """When the deadline is, as `time.monotonic()`."""
    values: list[object] | None
    """What `keep` made of the values, None before."""

    @property
    def refs(self) -> list[Ref]:
        """What Ray is asked for."""

    def raise_failure(self, index: int, error: RayError) -> NoReturn:
        """Raise the error for result `index`, for which Ray has `error`."""

    def raise_if_dropped(self) -> None:
        """Raise WorkerMethodError if a result was cancelled."""

    def raise_if_late(self) -> None:
        """Raise CallTimeoutError if a result is missing at the deadline."""

    def look(self) -> None:
        """Check the ranks, and log what is waited for. Called once a slice."""

    def keep(self, values: list[object]) -> None:
        """Keep the values, in the order of `refs`."""


def until_deadline(awaited: Sequence[Awaited], seconds: float, limit: float | None) -> float:
    """Return `seconds`, or less if a deadline or the limit (`time.monotonic()`) comes first."""
    expires = [at for at in [limit, *(a.expires for a in awaited)] if at is not None]
    return max(0.0, min([seconds, *(at - time.monotonic() for at in expires)]))


def wait_in_slices(
    awaited: Sequence[Awaited], refs: list[Ref], limit: float | None, *, failed: bool
) -> list[object]:
    """Return the value of every reference, in order. For the arguments see `Slices`."""
    try:
        found = Slices(awaited, refs, limit, failed=failed).wait()
    except QuadrigaError as error:
        # Ray's error, which refers to this one as its cause, is in variables of the frames below
        # and may be the context. The cycle would keep the batches of every calling frame.
        if isinstance(error.__context__, RayError):
            error.__context__ = error.__context__.__context__
        error.__traceback__ = None
        raise
    return [found[ref] for ref in refs]


class Slices:
    """A wait in slices. Consumes: references. Waits for: all of them. Unblocked by: the last value,
    the first failure, a deadline, a lost node, a watched group that breaks."""

    def __init__(
        self,
        awaited: Sequence[Awaited],
        refs: list[Ref],
        limit: float | None,
        *,
        failed: bool = False,
    ) -> None:
        """Args:
        awaited: what to wait for.
        refs: all references of `awaited`.
        limit: when this wait ends without a result, as `time.monotonic()`; None: never.
        failed: one of the results is an error.
        """
        self._awaited = awaited
        self._limit = limit
        self._home = {ref: (a, i) for a in awaited for i, ref in enumerate(a.refs)}
        # Each reference once: `ray.wait` refuses a list that contains one twice.
        self._running = list(dict.fromkeys(refs))
        self._remote: list[Ref] = []
        """Results that exist and that are being pulled from another node."""
        self._values: dict[Ref, object] = {}
        self._failed = failed
        self._began = time.monotonic()

    def wait(self) -> dict[Ref, object]:
        """Return the value of every reference."""
        if self._failed:
            self._take_running(0.0)  # finds which one failed
        while self._running or self._remote:
            # A result that exists is received even if its pull ends after the deadline.
            pause = max(MIN_SLICE_S, until_deadline(self._awaited, SLICE_S, self._limit))
            self._take_running(pause)
            # While ranks run, their wait is the pause of the slice, and the pull only goes on.
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
        if not refs:
            return []
        try:
            self._values.update(zip(refs, fetch(refs, timeout=0), strict=True))
            return []
        except GetTimeoutError:
            if len(refs) == 1:
                return refs
        except RayError as error:
            if len(refs) == 1:
                home, index = self._home[refs[0]]
                home.raise_failure(index, error)
        # Some of several failed or are on another node: find out which, one at a time.
        #   [a: local, b: remote, c: failed]    a is read, b is kept for the pull, c raises
        return [rest for ref in refs for rest in self._read([ref])]

    def _look(self) -> None:
        if broken_groups:
            raise_if_broken()
        now = time.monotonic()
        collect_in_wait(now - self._began)
        if self._limit is not None and now >= self._limit:
            missing = {self._home[ref][0].label for ref in (*self._running, *self._remote)}
            raise CallTimeoutError(
                f"The future of {', '.join(sorted(missing))} has no result in time. The call goes "
                "on."
            )
        for awaited in self._awaited:
            if awaited.expires is not None and now >= awaited.expires:
                awaited.raise_if_late()
            awaited.look()


logger = logging.getLogger("quadriga.controller")

# A call of 0.05 s takes one `ray.get`. One of 0.9 s takes a `ray.get` of 0.2 s and two slices: from
# 0.2 to 0.7 s and from 0.7 to 0.9 s.
FIRST_WAIT_S = 0.2
"""How long a wait asks Ray for everything at once, before it goes on in slices."""
PROBE_S = 2.0
"""How often a wait asks the nodes."""
LOG_S = 60.0
"""How often a long wait logs which ranks it waits for."""


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
        fields: Sequence[Sequence[Ref]] = (),
    ) -> None:
        """Args:
        refs: first return of each task.
        handles: the rank of each task.
        label: "role.method", for messages.
        timeout: seconds from now to CallTimeoutError.
        ranks: the group; it is marked as broken if ranks had to be killed.
        fields: the returns of fields of each task; may be left out if no task has one.
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
        self.dropped: set[int] = set()
        """Positions of results that were cancelled here, while their ranks run the call."""

    def gather(self) -> list[object]:
        """Return all values in order; wait for them once.

        Raises `WorkerMethodError` if a method raised, `WorkerDiedError` if a process has ended,
        `CallTimeoutError` if the deadline is exceeded.
        """
        if self.values is None:
            wait_for([self])
        assert self.values is not None
        self.raise_if_dropped()
        return self.values

    def raise_if_dropped(self) -> None:
        """Raise `WorkerMethodError` if one of the results was cancelled here."""
        if self.dropped:
            raise cancelled(self.label, self.handles[min(self.dropped)])

    def waits_for(self, handle: RankHandle) -> bool:
        """Return whether the result of that rank is missing: it runs, or its process has ended."""
        for ref, mine in zip(self.refs, self.handles, strict=True):
            if mine is handle and self.values is None:
                return not is_returned(ref)
        return False

    def keep(self, values: list[object]) -> None:
        """Open what the tasks returned, and note how many objects the fields of results fill."""
        for i, returned in enumerate(values):
            method = self.handles[i].methods.get(self.label)
            if method is not None:
                method.received(returned)
            values[i] = opened(returned, self.refs[i], self.fields[i] if self.fields else ())
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
        raise late(self.label, self.timeout, stuck)

    def look(self) -> None:
        """Raise WorkerDiedError if the node of a running rank is lost; log a long wait."""
        self.raise_if_dropped()
        now = time.monotonic()
        if now - self._probed >= PROBE_S:
            self._probed = now
            self._raise_if_node_lost()
        if now - self._logged >= LOG_S:
            self._logged = now
            waited, running = now - self.started, places(self._unfinished())
            logger.warning("waiting for %s on rank(s) %s for %.0f s", self.label, running, waited)

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


class RayPending(PendingValue):
    """One rank's result.

    In the process that made the call it knows the batch, so that a failure of any peer ends the
    wait. Pickled, it carries the reference, the name of its source and what is left of the
    deadline.
    """

    __slots__ = (
        "batch", "dropped", "expires", "fields", "index", "label", "ref", "returned", "values",
    )  # fmt: skip

    def __init__(
        self,
        ref: Ref,
        fields: Sequence[Ref] = (),
        batch: RayBatch | None = None,
        index: int = 0,
        label: str = "",
        left: float | None = None,
        dropped: bool = False,
    ) -> None:
        """Args:
        ref: first return of the task.
        fields: the returns of fields of the task.
        batch: the submission, None in another process.
        index: position in the batch.
        label: "role.method, rank r on node", for messages where the batch is not known.
        left: seconds until the deadline of the call, None without a deadline.
        dropped: the result was cancelled, here or where the batch is known.
        """
        self.ref = ref
        self.fields = fields
        self.batch = batch
        self.index = index
        self.label = label
        self.dropped = dropped
        self.expires = None if left is None else time.monotonic() + left
        self.values: list[object] | None = None
        """The value, once it was waited for, where the batch is not known."""
        self.returned = False
        """Whether the task is known to have returned and not raised."""

    @property
    def refs(self) -> list[Ref]:
        """The reference, as a list of one."""
        return [self.ref]

    @property
    def value_here(self) -> object:
        """The value if it was waited for before, else None."""
        known = self.values if self.batch is None else self.batch.values
        return None if known is None else known[self.index]

    def result(self) -> object:
        """Wait for the value. Raises what the worker raised."""
        if self.batch is not None:
            return self.batch.gather()[self.index]
        self.raise_if_dropped()
        if self.values is None:
            wait_for([self])
        assert self.values is not None
        return self.values[0]

    def done(self) -> bool:
        """Return whether the value, or the error instead of it, exists."""
        return (
            self._is_known()
            or self._is_dropped
            or bool(ray.wait(self.refs, timeout=0, fetch_local=False)[0])
        )

    @staticmethod
    def all_done(pendings: Sequence[RayPending]) -> bool:
        """Return whether `wait_all` returns or raises without waiting for a rank.

        It raises when one rank has failed, at the deadline of a call, and while a watched group is
        broken.
        """
        missing = {p.ref: p for p in pendings if not p._is_known()}
        if not missing or broken_groups or any(p._is_dropped for p in pendings):
            return True
        deadlines = {p.expires if p.batch is None else p.batch.expires for p in missing.values()}
        if any(at is not None and time.monotonic() >= at for at in deadlines):
            return True
        refs = list(missing)
        ended, running = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return not running or any(missing[ref]._has_failed() for ref in ended)

    def _is_known(self) -> bool:
        return (self.values if self.batch is None else self.batch.values) is not None

    def _has_failed(self) -> bool:
        """Return whether the task, which has ended, has raised. Reads its result at most once."""
        if not self.returned:
            try:
                fetch([self.ref], timeout=0)
            except GetTimeoutError:
                pass  # a large result on another node: an error would be here
            except RayError:
                return True
            self.returned = True
        return False

    def cancel(self) -> bool:
        """Drop the result. Return False if it exists.

        A rank with coroutine methods ends the call. Another rank runs it when its turn comes.
        """
        if self.done():
            return False
        if self.batch is None:
            self.dropped = True
        elif self.batch.handles[self.index].facts.interleaves:
            ray.cancel(self.ref)
        else:
            # Ray is not asked: a call that it cancels before it is sent leaves a gap in the numbers
            # of the calls of that rank, which then waits 30 s for it and refuses the next call.
            self.batch.dropped.add(self.index)
        return True

    @staticmethod
    def wait_all(pendings: Sequence[RayPending], timeout: float | None = None) -> None:
        """Wait until every value is known. The first failure of any of them is raised.

        Raises `CallTimeoutError` after `timeout` seconds; the calls go on.
        """
        # The results of one submission are waited for as one batch. Two calls of 4 ranks and one
        # result of another process: 9 pendings, 3 things to wait for.
        wait_for(list({id(p.batch or p): p.batch or p for p in pendings}.values()), timeout)

    def keep(self, values: list[object]) -> None:
        """Open the value. Used where the batch is not known."""
        self.values = [opened(values[0], self.ref, self.fields)]

    def raise_failure(self, index: int, error: RayError) -> NoReturn:
        """Raise the worker's error, or WorkerDiedError that names the source."""
        if isinstance(error, RayTaskError) and isinstance(error.cause, QuadrigaError):
            raise error.cause from None
        if isinstance(error, DEAD):
            raise WorkerDiedError(
                f"An argument is the result of {self.label}, whose process has ended."
            ) from error
        raise error

    def raise_if_late(self) -> None:
        """Raise CallTimeoutError if the result does not exist at the deadline of its call."""
        if not ray.wait(self.refs, timeout=0, fetch_local=False)[0]:
            raise CallTimeoutError(
                f"An argument is the result of {self.label}, which exceeded its deadline."
            )

    def look(self) -> None:
        """Raise WorkerMethodError if the result was cancelled. Its rank cannot be checked here."""
        self.raise_if_dropped()

    @property
    def _is_dropped(self) -> bool:
        return self.dropped if self.batch is None else self.index in self.batch.dropped

    def raise_if_dropped(self) -> None:
        """Raise WorkerMethodError if the result was cancelled."""
        if self.dropped:
            raise cancelled(self.label)

    def __reduce__(self) -> tuple[object, ...]:
        label, expires = self.label, self.expires
        if self.batch is not None:
            facts = self.batch.handles[self.index].facts
            label = f"{self.batch.label}, rank {facts.rank} on {facts.node}"
            expires = self.batch.expires
        # The time that is left is sent, because `time.monotonic()` differs between nodes:
        #   here     expires 5010.0, now 5003.0    sends 7.0
        #   there    now 120.0                     expires 127.0
        left = None if expires is None else max(0.0, expires - time.monotonic())
        return RayPending, (self.ref, self.fields, None, 0, label, left, self._is_dropped)


class RayPendings(Sequence[RayPending]):
    """The results of one submission, by position. Each is made when it is asked for: a blocking
    call waits for the batch and asks for none, and a thousand of them take a millisecond."""

    def __init__(self, batch: RayBatch) -> None:
        self.batch = batch

    @overload
    def __getitem__(self, index: int) -> RayPending: ...
    @overload
    def __getitem__(self, index: slice) -> list[RayPending]: ...
    def __getitem__(self, index: int | slice) -> RayPending | list[RayPending]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        batch = self.batch
        number = range(len(batch.refs))[index]
        fields = batch.fields[number] if batch.fields else ()
        return RayPending(batch.refs[number], fields, batch, number)

    def __len__(self) -> int:
        return len(self.batch.refs)


def wait_for(awaited: Sequence[Awaited], timeout: float | None = None) -> None:
    """Wait until all results are known. Raises the first failure of any of them, `CallTimeoutError`
    at the earliest deadline and after `timeout` seconds, and the error of a watched group that
    breaks."""
    limit = None if timeout is None else time.monotonic() + timeout
    for a in awaited:
        a.raise_if_dropped()
    missing = [a for a in awaited if a.values is None]
    refs = [ref for a in missing for ref in a.refs]
    first = FIRST_WAIT_S
    if limit is not None or any(a.expires is not None for a in missing):
        first = until_deadline(missing, first, limit)
    values, failed = None, False
    try:
        values = ray.get(refs, timeout=first) if refs else []
    except RayError as error:
        failed = not isinstance(error, GetTimeoutError)
        error.__traceback__ = None  # see `cluster.fetch`
    # Outside of `except`, so that a failure is not shown with Ray's time-out as its context.
    values = wait_in_slices(missing, refs, limit, failed=failed) if values is None else values
    # `values` is in the order of `refs`. A batch of 3 ranks, then one result by itself: the first
    # keeps values[0:3], the second values[3:4].
    start = 0
    for a in missing:
        a.keep(values[start : start + len(a.refs)])
        start += len(a.refs)
