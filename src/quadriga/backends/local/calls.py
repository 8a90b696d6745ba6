"""Carrying calls to ranks that are objects of this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from quadriga.backends.local.deadlines import RunningCall
from quadriga.backends.local.store import LocalStore
from quadriga.errors import WorkerDiedError, WorkerError
from quadriga.protocol.values.storage import use_store
from quadriga.single_controller.backend import RankHandle, RankSet
from quadriga.single_controller.call import Call, Pending
from quadriga.single_controller.ranks.environment import environment
from quadriga.single_controller.ranks.rank_host import RankHost


@dataclass(frozen=True)
class LocalRank:
    """One rank: its workers, and the environment variables they see while they run."""

    host: RankHost
    variables: dict[str, str]

    def invoke(self, call: Call, timeout: float | None) -> Any:
        """Run the call to its end. Raises CallTimeoutError if that took longer than `timeout`."""
        with environment(self.variables), RunningCall(self.host, call, timeout):
            return self.host.invoke(call)


@dataclass(frozen=True)
class LocalPending:
    """An answer that is here already, or the error instead of it."""

    value: Any = None
    error: Exception | None = None

    @property
    def arrived(self) -> Any:
        """The value; None if there is an error instead."""
        return self.value

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class LocalCallBackend:
    """See `quadriga.single_controller.backend.CallBackend`."""

    @cached_property
    def store(self) -> LocalStore:
        """Where batches by reference lie."""
        return LocalStore()

    def submit(
        self,
        ranks: RankSet,
        targets: Sequence[int],
        calls: Sequence[Call],
        timeout: float | None,
    ) -> Sequence[Pending]:
        """Run each call to its end, rank after rank; a deadline is one rank's own."""
        answers = []
        for target, call in zip(targets, calls, strict=True):
            handle = ranks.handles[target]
            rank: LocalRank = handle.native
            try:
                if not self.is_alive(handle):
                    raise self.death(ranks, handle)
                with use_store(self.store):
                    answers.append(LocalPending(rank.invoke(call, timeout)))
            except Exception as error:  # raised where the caller waits, as with other engines
                answers.append(LocalPending(error=error))
        return answers

    def gather(self, pendings: Sequence[Pending]) -> list[Any]:
        """The answers in order; the first rank's error is raised."""
        return [pending.result() for pending in pendings]

    def share(self, packed: Any, value: Any) -> Any:
        """Nothing is sent anywhere."""
        return packed

    def is_alive(self, handle: RankHandle) -> bool:
        """A rank lives as long as this process, or until it is killed."""
        return bool(handle.native.host.workers)

    def death(self, ranks: RankSet, handle: RankHandle) -> WorkerError:
        """The error for a rank that was killed; a call in flight is in the caller's own hands."""
        role, rank = "+".join(ranks.roles), handle.facts.rank
        return WorkerDiedError(f"{role} rank {rank} was ended.", role=role, rank=rank, method="")

    def kill(self, handle: RankHandle) -> None:
        """Drop the rank's workers."""
        handle.native.host.workers.clear()
