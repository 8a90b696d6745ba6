"""Running calls on ranks that are objects of this process, and the store of remote fields.

Values in the store stay in this process. A handle holds its value, and the value is freed with the
last handle.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from quadriga.backends.local.deadlines import RunningCall
from quadriga.errors import CallTimeoutError, WorkerDiedError, WorkerError
from quadriga.protocol.storage import Handle, InProcessStore, LocalHandle, snapshot, use_store
from quadriga.single_controller.backend import RankHandle, RankSet
from quadriga.single_controller.call import Call, Pending
from quadriga.single_controller.ranks.environment import environment
from quadriga.single_controller.ranks.rank_host import RankHost


class CountedHandle(LocalHandle):
    """A stored value. A pickle of the handle contains the value."""

    __slots__ = ()


class LocalStore(InProcessStore):
    """Keep a snapshot of each value in its handle.

    `bytes_held` and `objects_held` count the values whose handles exist.
    """

    def __init__(self) -> None:
        self.bytes_held = 0
        self.objects_held = 0

    def put(self, value: object, nbytes: int = 0) -> Handle:
        """Store a copy of `value`."""
        handle = CountedHandle(snapshot(value), nbytes)
        self.bytes_held += nbytes
        self.objects_held += 1
        weakref.finalize(handle, self._released, nbytes).atexit = False
        return handle

    def _released(self, nbytes: int) -> None:
        self.bytes_held -= nbytes
        self.objects_held -= 1


@dataclass(frozen=True)
class LocalRank:
    """One rank: its workers, and the environment variables that are set while they run."""

    host: RankHost
    variables: dict[str, str]

    def invoke(self, call: Call, timeout: float | None) -> object:
        """Run the call to its end. Raises `CallTimeoutError` if that took longer than `timeout`."""
        with environment(self.variables), RunningCall(self.host, call, timeout):
            return self.host.invoke(call)


@dataclass(frozen=True)
class LocalPending:
    """The result of a call that has ended, or its error."""

    value: object = None
    error: Exception | None = None

    @property
    def arrived(self) -> object:
        """The value; None if the call failed."""
        return self.value

    def done(self) -> bool:
        """Return True: a local call ends before `submit` returns."""
        return True

    def cancel(self) -> bool:
        """Return False: nothing is left that could be dropped."""
        return False

    def result(self) -> object:
        """Return the value. Raises the error of the call."""
        if self.error is not None:
            raise self.error
        return self.value


class LocalCallBackend:
    """Implement `quadriga.single_controller.backend.CallBackend` in one process."""

    @cached_property
    def store(self) -> LocalStore:
        """Where remote fields are stored."""
        return LocalStore()

    def submit(
        self,
        ranks: RankSet,
        targets: Sequence[int],
        calls: Sequence[Call],
        timeout: float | None,
    ) -> Sequence[Pending]:
        """Run each call to its end, rank after rank. A deadline applies to each rank by itself.

        As on Ray, a rank runs one call at a time: the call of another thread waits. If it
        waits for `timeout` seconds, its results are a `CallTimeoutError`.
        """
        try:
            with _turn(ranks, calls[0].label, timeout):
                return [
                    self._run(ranks, ranks.handles[target], call, timeout)
                    for target, call in zip(targets, calls, strict=True)
                ]
        except CallTimeoutError as late:  # raised where the caller waits
            return [LocalPending(error=late)] * len(targets)

    def _run(
        self, ranks: RankSet, handle: RankHandle, call: Call, timeout: float | None
    ) -> LocalPending:
        try:
            if not self.is_alive(handle):
                raise self.death(ranks, handle)
            with use_store(self.store):
                return LocalPending(rank_of(handle).invoke(call, timeout))
        except Exception as error:  # raised where the caller waits, as on the Ray backend
            return LocalPending(error=error)

    def gather(self, pendings: Sequence[Pending]) -> list[object]:
        """Return the results in order. The first rank's error is raised."""
        return [pending.result() for pending in pendings]

    def share(self, packed: object, value: object) -> object:
        """Return `packed`: nothing is sent to another process."""
        return packed

    def is_alive(self, handle: RankHandle) -> bool:
        """Return whether the rank has its workers: until it is killed."""
        return bool(rank_of(handle).host.workers)

    def dead(self, handles: Sequence[RankHandle]) -> list[RankHandle]:
        """Return the ranks that were killed."""
        return [handle for handle in handles if not self.is_alive(handle)]

    def death(self, ranks: RankSet, handle: RankHandle) -> WorkerError:
        """Return the error for a rank that was killed."""
        role, rank = "+".join(ranks.roles), handle.facts.rank
        return WorkerDiedError(f"{role} rank {rank} was ended.", role=role, rank=rank, method="")

    def kill(self, handle: RankHandle) -> None:
        """Drop the rank's workers."""
        rank_of(handle).host.workers.clear()


@dataclass
class _Turn:
    """The right of a chain of calls to run calls of a group."""

    ranks: RankSet
    ended: bool = False


_turns: ContextVar[tuple[_Turn, ...]] = ContextVar("turns", default=())
"""The turns of the chain of calls that runs here: group A calls B, whose coroutine calls A."""


@contextmanager
def _turn(ranks: RankSet, label: str, timeout: float | None) -> Iterator[None]:
    """Wait until no other chain of calls runs a call of the group, and keep others out.

    A chain may go on in another thread, for which `ranks.lock` is taken although its holder waits.
    Tasks and threads that a call has started keep their context when it has ended, hence `ended`.
    """
    held = _turns.get()
    if any(turn.ranks is ranks and not turn.ended for turn in held):
        yield
        return
    if not ranks.lock.acquire(timeout=-1 if timeout is None else timeout):
        raise CallTimeoutError(
            f"{label} exceeded its deadline of {timeout:g} s before it started: another thread "
            "runs a call of its group. If that call waits for this one, let one thread make both.",
            method=label.rpartition(".")[2],
            stacks={},
        )
    turn = _Turn(ranks)
    token = _turns.set((*held, turn))
    try:
        yield
    finally:
        turn.ended = True
        _turns.reset(token)
        ranks.lock.release()


def rank_of(handle: RankHandle) -> LocalRank:
    """Return the rank of a handle of this backend."""
    return cast(LocalRank, handle.native)
