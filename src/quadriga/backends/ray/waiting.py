"""Waiting for results of ranks: the first failure of any of them ends the wait.

    RayBatch       the results of one submission
    RayPending     one of them; pickled, it becomes a batch of one result, whose rank is not known
    wait_for       waits for several batches at once

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, NoReturn, overload

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from quadriga.backends.ray.cluster import fetch
from quadriga.backends.ray.health import (
    DEAD,
    FailedCall,
    cancelled,
    died,
    is_returned,
    late,
    lost_nodes,
    places,
)
from quadriga.backends.ray.memory import collect_in_wait
from quadriga.backends.ray.store import opened
from quadriga.errors import CallTimeoutError, QuadrigaError, WorkerDiedError
from quadriga.protocol.threads import PendingValue
from quadriga.single_controller.backend import RankHandle, RankSet, broken_groups, raise_if_broken

if TYPE_CHECKING:
    from quadriga.backends.ray.cluster import Ref

logger = logging.getLogger("quadriga.controller")

# A call of 0.05 s takes one `ray.get`. One of 0.9 s takes a `ray.get` of 0.2 s and two slices: from
# 0.2 to 0.7 s and from 0.7 to 0.9 s.
FIRST_WAIT_S = 0.2
"""How long a wait asks Ray for everything at once, before it goes on in slices."""
SLICE_S = 0.5
"""Length of a slice: how long a failure of one rank may go unnoticed while others run."""
MIN_SLICE_S = 0.01
PROBE_S = 2.0
"""How often a wait asks the nodes."""
LOG_S = 60.0
"""How often a long wait logs which ranks it waits for."""


@dataclass(eq=False)
class RayBatch:
    """The results of one submission, one per rank.

    Consumes: the references of the tasks. Waits for: every rank, the first failure, the deadline,
    or a watched group that breaks. Unblocked by: any of these.
    """

    refs: list[Ref]
    """First return of each task."""
    handles: Sequence[RankHandle] = ()
    """The rank of each task; none for results of a call of another process."""
    label: str = ""
    """"role.method", for messages; where the ranks are not known with rank and node."""
    timeout: float | None = None
    """Seconds from the start to CallTimeoutError."""
    ranks: RankSet | None = None
    """The group; it is marked as broken if ranks had to be killed."""
    fields: Sequence[Sequence[Ref]] = ()
    """The returns of fields of each task; may be left out if no task has one."""
    values: list[object] | None = None
    dropped: set[int] = field(default_factory=set)
    """Positions of results that were cancelled here, while their ranks run the call."""

    def __post_init__(self) -> None:
        self.started = self._logged = self._probed = time.monotonic()
        self.expires = None if self.timeout is None else self.started + self.timeout

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
        """Raise `WorkerMethodError` if one of the results was cancelled."""
        if self.dropped:
            raise cancelled(self.label, self.handles[min(self.dropped)] if self.handles else None)

    def waits_for(self, handle: RankHandle) -> bool:
        """Return whether the result of that rank is missing: it runs, or its process has ended."""
        for ref, mine in zip(self.refs, self.handles, strict=True):
            if mine is handle and self.values is None:
                return not is_returned(ref)
        return False

    def keep(self, values: Iterable[object]) -> None:
        """Open what the tasks returned, and note how many objects the fields of results fill."""
        self.values = []
        for i, returned in enumerate(values):
            method = self.handles[i].methods.get(self.label) if self.handles else None
            if method is not None:
                method.received(returned)
            fields = self.fields[i] if self.fields else ()
            self.values.append(opened(returned, self.refs[i], fields))

    def raise_failure(self, index: int, error: RayError) -> NoReturn:
        """Raise the failure that came first, of all that are known after a short grace.

        `index`: the result for which Ray has `error`.
        """
        if not self.handles:
            if isinstance(error, RayTaskError) and isinstance(error.cause, QuadrigaError):
                raise error.cause from None
            if isinstance(error, DEAD):
                raise WorkerDiedError(
                    f"An argument is the result of {self.label}, whose process has ended."
                ) from error
            raise error
        call = FailedCall(self.refs, self.handles, self.fields, self.label)
        first = call.first_failure(index, error)
        if self.ranks is not None:
            call.mark_as_broken(self.ranks, str(first).splitlines()[0])
        raise first from getattr(first, "cause", None)

    def look(self, now: float) -> None:
        """Check deadline and nodes, and log what is waited for. Called once a slice."""
        if self.expires is not None and now >= self.expires and (stuck := self._unfinished()):
            if self.handles:
                raise late(self.label, self.timeout, [self.handles[i] for i in stuck])
            raise CallTimeoutError(
                f"An argument is the result of {self.label}, which exceeded its deadline."
            )
        self.raise_if_dropped()
        if self.handles and now - self._probed >= PROBE_S:
            self._probed = now
            lost = lost_nodes({handle.facts.node_id for handle in self.handles})
            for i in self._unfinished() if lost else ():
                if self.handles[i].facts.node_id in lost:
                    raise died(self.handles[i], self.label, "its node does not respond")
        if self.handles and now - self._logged >= LOG_S:
            self._logged = now
            waited, running = now - self.started, [self.handles[i] for i in self._unfinished()]
            logger.warning(
                "waiting for %s on rank(s) %s for %.0f s", self.label, places(running), waited
            )

    def _unfinished(self) -> list[int]:
        done, _ = ray.wait(self.refs, num_returns=len(self.refs), timeout=0, fetch_local=False)
        finished = set(done)
        return [i for i, ref in enumerate(self.refs) if ref not in finished]


def pending_of(
    ref: Ref,
    label: str,
    fields: Sequence[Ref] = (),
    left: float | None = None,
    dropped: bool = False,
) -> RayPending:
    """Return a result whose rank is not known in this process.

    Args:
        ref: first return of the task.
        label: whose result it is, for messages: "role.method, rank r on node".
        fields: the returns of fields of the task.
        left: seconds until the deadline of the call, None without a deadline.
        dropped: the result was cancelled.
    """
    batch = RayBatch([ref], (), label, left, fields=[fields], dropped={0} if dropped else set())
    return RayPending(batch, 0)


class RayPending(PendingValue):
    """One rank's result: number `index` of a batch.

    A failure of any peer in the batch ends the wait. Pickled, it carries the reference, the name of
    its source and what is left of the deadline.
    """

    __slots__ = ("_returned", "batch", "index")

    def __init__(self, batch: RayBatch, index: int) -> None:
        self.batch = batch
        self.index = index
        self._returned = False
        """Whether the task is known to have returned and not raised."""

    @property
    def ref(self) -> Ref:
        """The first return of the task."""
        return self.batch.refs[self.index]

    @property
    def value_here(self) -> object:
        """The value if it was waited for before, else None."""
        return None if self.batch.values is None else self.batch.values[self.index]

    def result(self) -> object:
        """Wait for the value. Raises what the worker raised."""
        return self.batch.gather()[self.index]

    def done(self) -> bool:
        """Return whether the value, or the error instead of it, exists."""
        if self.batch.values is not None or self.index in self.batch.dropped:
            return True
        return bool(ray.wait([self.ref], timeout=0, fetch_local=False)[0])

    @staticmethod
    def all_done(pendings: Sequence[RayPending]) -> bool:
        """Return whether `wait_all` returns or raises without waiting for a rank.

        It raises when one rank has failed, at the deadline of a call, and while a watched group is
        broken.
        """
        missing = {p.ref: p for p in pendings if p.batch.values is None}
        if not missing or broken_groups or any(p.index in p.batch.dropped for p in pendings):
            return True
        deadlines = {p.batch.expires for p in missing.values()}
        if any(at is not None and time.monotonic() >= at for at in deadlines):
            return True
        refs = list(missing)
        ended, running = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
        return not running or any(missing[ref]._has_failed() for ref in ended)

    def _has_failed(self) -> bool:
        """Return whether the task, which has ended, has raised. Reads its result at most once."""
        if not self._returned:
            try:
                fetch([self.ref], timeout=0)
            except GetTimeoutError:
                pass  # a large result on another node: an error would be here
            except RayError:
                return True
            self._returned = True
        return False

    def cancel(self) -> bool:
        """Drop the result. Return False if it exists.

        A rank with coroutine methods ends the call. Another rank runs it when its turn comes.
        """
        if self.done():
            return False
        handles = self.batch.handles
        if handles and handles[self.index].facts.interleaves:
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
        wait_for(list({id(p.batch): p.batch for p in pendings}.values()), timeout)

    def __reduce__(self) -> tuple[object, ...]:
        batch, label = self.batch, self.batch.label
        if batch.handles:
            facts = batch.handles[self.index].facts
            label = f"{label}, rank {facts.rank} on {facts.node}"
        # The time that is left is sent, because `time.monotonic()` differs between nodes:
        #   here     expires 5010.0, now 5003.0    sends 7.0
        #   there    now 120.0                     expires 127.0
        left = None if batch.expires is None else max(0.0, batch.expires - time.monotonic())
        fields = batch.fields[self.index] if batch.fields else ()
        return pending_of, (self.ref, label, fields, left, self.index in batch.dropped)


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
        numbers = range(len(self))[index]
        if isinstance(numbers, range):
            return [RayPending(self.batch, number) for number in numbers]
        return RayPending(self.batch, numbers)

    def __len__(self) -> int:
        return len(self.batch.refs)


def wait_for(batches: Sequence[RayBatch], timeout: float | None = None) -> None:
    """Wait until all results are known. Raises the first failure of any of them, `CallTimeoutError`
    at the earliest deadline and after `timeout` seconds, and the error of a watched group that
    breaks."""
    limit = None if timeout is None else time.monotonic() + timeout
    for batch in batches:
        batch.raise_if_dropped()
    missing = [batch for batch in batches if batch.values is None]
    refs = [ref for batch in missing for ref in batch.refs]
    values, failed = None, False
    try:
        values = ray.get(refs, timeout=_until(missing, FIRST_WAIT_S, limit)) if refs else []
    except RayError as error:
        failed = not isinstance(error, GetTimeoutError)
        error.__traceback__ = None  # see `cluster.fetch`
    # Outside of `except`, so that a failure is not shown with Ray's time-out as its context.
    values = _wait_in_slices(missing, refs, limit, failed) if values is None else values
    # `values` is in the order of `refs`. A batch of 3 ranks, then one result by itself: the first
    # keeps values[0:3], the second values[3:4].
    rest = iter(values)
    for batch in missing:
        batch.keep(islice(rest, len(batch.refs)))


def _until(batches: Sequence[RayBatch], seconds: float, limit: float | None) -> float:
    """Return `seconds`, or less if a deadline or the limit (`time.monotonic()`) comes first."""
    expires = [at for at in [limit, *(batch.expires for batch in batches)] if at is not None]
    return max(0.0, min(seconds, min(expires) - time.monotonic())) if expires else seconds


def _wait_in_slices(
    batches: Sequence[RayBatch], refs: list[Ref], limit: float | None, failed: bool
) -> list[object]:
    """Return the value of every reference, in order. For the arguments see `Slices`."""
    try:
        found = Slices(batches, refs, limit).wait(failed)
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

    def __init__(self, batches: Sequence[RayBatch], refs: list[Ref], limit: float | None) -> None:
        """Args:
        batches: what to wait for.
        refs: all references of `batches`.
        limit: when this wait ends without a result, as `time.monotonic()`; None: never.
        """
        self._batches = batches
        self._limit = limit
        self._home = {ref: (batch, i) for batch in batches for i, ref in enumerate(batch.refs)}
        # Each reference once: `ray.wait` refuses a list that contains one twice.
        self._running = list(dict.fromkeys(refs))
        self._remote: list[Ref] = []
        """Results that exist and that are being pulled from another node."""
        self._values: dict[Ref, object] = {}
        self._began = time.monotonic()

    def wait(self, failed: bool) -> dict[Ref, object]:
        """Return the value of every reference. `failed`: one of the results is an error."""
        pause = 0.0 if failed else None
        while self._running or self._remote:
            if pause is None:
                # A result that exists is received even if its pull ends after the deadline.
                pause = max(MIN_SLICE_S, _until(self._batches, SLICE_S, self._limit))
            self._running, found = self._ready(self._running, pause, fetch_local=False)
            self._remote += found
            # While ranks run, their wait is the pause of the slice, and the pull only goes on.
            pull = 0.0 if self._running else pause
            self._remote, found = self._ready(self._remote, pull, fetch_local=True)
            self._remote += found
            if self._running or self._remote:
                self._look()
            pause = None
        return self._values

    def _ready(
        self, refs: list[Ref], timeout: float, fetch_local: bool
    ) -> tuple[list[Ref], list[Ref]]:
        """Wait for references and read those that exist.

        Return the references that do not exist, and of the others those that are not here.
        """
        if not refs:
            return [], []
        ready, missing = ray.wait(
            refs, num_returns=len(refs), timeout=timeout, fetch_local=fetch_local
        )
        return missing, self._read(ready)

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
        raise_if_broken()
        now = time.monotonic()
        collect_in_wait(now - self._began)
        if self._limit is not None and now >= self._limit:
            missing = {self._home[ref][0].label for ref in (*self._running, *self._remote)}
            raise CallTimeoutError(
                f"The future of {', '.join(sorted(missing))} has no result in time. The call goes "
                "on."
            )
        for batch in self._batches:
            batch.look(now)
