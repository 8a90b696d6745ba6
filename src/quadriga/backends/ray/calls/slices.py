"""A long wait for results of ranks, in slices. One slice:

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

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayError

from quadriga.backends.ray.cluster import fetch
from quadriga.backends.ray.process.memory import collect_in_wait
from quadriga.errors import CallTimeoutError, QuadrigaError
from quadriga.single_controller.watch import broken_groups, raise_if_broken

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
