"""The replicas of a rollout: worker groups that start, end and fail one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from quadriga.errors import (
    CallTimeoutError,
    InputError,
    QuadrigaError,
    RolloutDiedError,
    RolloutError,
    WorkerDiedError,
    WorkerError,
    WorkerInitError,
    WorkerMethodError,
)
from quadriga.protocol import DataProtoFuture, as_completed
from quadriga.workers.roles import ReceivingGroup, RolloutGroup

_log = logging.getLogger("quadriga")

FROM_FOLDER = -1
"""The version of weights that an engine has loaded from the folder of its model."""


class ReplicaGroup(RolloutGroup, ReceivingGroup, Protocol):
    """The worker group of one replica: one rank, or the ranks that hold one copy together."""

    def shutdown(self) -> None:
        """End its processes."""
        ...


@dataclass(eq=False)
class Replica:
    """One replica.

    Attributes:
        number: from 0, for messages and for the router. A replica that is started again keeps it.
        group: its ranks.
        loss: why it is lost; None: it works.
        starts: how often it was started.
    """

    number: int
    group: ReplicaGroup
    loss: QuadrigaError | None = None
    starts: int = 1


@dataclass(eq=False)
class Replicas:
    """All replicas of a rollout. At least one of them works, or every call raises.

    Args:
        start: starts the group of a replica. The caller ends all groups that it has started.
        count: the number of replicas.
        restarts: how many lost replicas are started again in the whole run.
    """

    start: Callable[[int], ReplicaGroup]
    count: int
    restarts: int = 0
    all: list[Replica] = field(init=False)
    version: int | None = field(default=None, init=False)
    """The version of the weights that all working replicas hold, as of the last weight sync.
    `FROM_FOLDER`: no sync is to come. None: the first one has not come yet."""
    _losses: list[QuadrigaError] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.all = [Replica(number, self.start(number)) for number in range(self.count)]

    @property
    def working(self) -> list[Replica]:
        """The replicas that are not lost.

        Raises:
            RolloutDiedError: all are lost. Its cause is the loss of the last one.
        """
        found = [replica for replica in self.all if replica.loss is None]
        if not found:
            raise self.none_left() from self._last_loss
        return found

    def none_left(self) -> RolloutDiedError:
        """Return the error of a run whose replicas are all lost."""
        reasons = "; ".join(f"replica {r.number}: {_line(r.loss)}" for r in self.all)
        return RolloutDiedError(
            f"all {self.count} replicas of the rollout are lost, so nothing can generate. {reasons}"
        )

    @property
    def _last_loss(self) -> QuadrigaError | None:
        return self._losses[-1] if self._losses else None

    def lose(self, replica: Replica, error: QuadrigaError) -> None:
        """End a replica, so that it neither answers late nor takes part in a weight sync."""
        if replica.loss is not None:
            return
        replica.loss = error
        self._losses.append(error)
        left = sum(r.loss is None for r in self.all)
        _log.warning(
            "replica %d of the rollout is lost, %d of %d are left: %s",
            replica.number, left, self.count, _line(error),
        )  # fmt: skip
        try:
            replica.group.shutdown()
        except QuadrigaError as problem:
            _log.warning("replica %d did not end: %s", replica.number, _line(problem))

    def restart_lost(self) -> None:
        """Start lost replicas again, as long as `restarts` allows. They hold the weights of
        the model folder then; in training the caller syncs the weights next.

        A replica that does not start stays lost.
        """
        for replica in self.all:
            if replica.loss is None or self.restarts <= 0:
                continue
            self.restarts -= 1
            try:
                group = self.start(replica.number)
                replica.group = group
                group.init_model()
            except (WorkerError, InputError) as error:
                _log.warning("replica %d cannot be started again: %s", replica.number, _line(error))
                with suppress(QuadrigaError):
                    replica.group.shutdown()
                continue
            replica.loss = None
            replica.starts += 1
            _log.warning("replica %d of the rollout was started again", replica.number)

    def init_model(self) -> None:
        """Load the model in all replicas, side by side."""
        started = {replica.group.init_model.submit(): replica for replica in self.all}
        for future in as_completed(started):
            future.get()  # a replica that cannot load the model at the start ends the run

    def submit(
        self, call: Callable[[ReplicaGroup], DataProtoFuture]
    ) -> dict[DataProtoFuture, Replica]:
        """Start a call of every working replica.

        Raises:
            QuadrigaError: the call cannot be sent, and its replica is not lost.
            RolloutDiedError: all replicas are lost.
        """
        calls: dict[DataProtoFuture, Replica] = {}
        for replica in self.working:
            try:
                calls[call(replica.group)] = replica
            except QuadrigaError as error:
                self._lose_or_raise(replica, error)
        return calls

    def collect(self, calls: Mapping[DataProtoFuture, Replica]) -> dict[Replica, object]:
        """Wait for calls of several replicas; return the results of those that work.

        Waits for: every call. Unblocked by: its result, its error or its deadline.

        Raises:
            QuadrigaError: the first error that is not the loss of a replica.
            RolloutDiedError: all replicas are lost.
        """
        results: dict[Replica, object] = {}
        for future in as_completed(calls):
            replica = calls[future]
            try:
                results[replica] = future.get()
            except QuadrigaError as error:
                self._lose_or_raise(replica, error)
        if calls and not results:
            raise self.none_left() from self._last_loss
        return results

    def _lose_or_raise(self, replica: Replica, error: QuadrigaError) -> None:
        if not is_loss(error):
            raise error
        self.lose(replica, error)


def is_loss(error: QuadrigaError) -> bool:
    """Return whether an error of a call means that its replica cannot be used again.

    The process has ended or is stuck, or its engine has failed. Input that an engine refuses and
    errors of the program are no loss: another replica would raise them too.
    """
    if isinstance(error, WorkerDiedError | CallTimeoutError | WorkerInitError):
        return True
    cause = error.__cause__ if isinstance(error, WorkerMethodError) else error
    return isinstance(cause, RolloutError) and not isinstance(cause, InputError)


def _line(error: BaseException | None) -> str:
    return str(error).split("\n", 1)[0]
