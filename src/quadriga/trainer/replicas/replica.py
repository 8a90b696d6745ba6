"""The replicas of a rollout: worker groups that start, end and fail one by one; their weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from quadriga.config.schema import RolloutEngineConfig, TrainConfig
from quadriga.errors import (
    CallTimeoutError,
    ConfigError,
    InputError,
    QuadrigaError,
    RolloutDiedError,
    RolloutError,
    WorkerDiedError,
    WorkerError,
    WorkerInitError,
    WorkerMethodError,
)
from quadriga.protocol import DataProto, DataProtoFuture, as_completed
from quadriga.rollout import rollout_of
from quadriga.single_controller import split_resource_pool
from quadriga.workers.roles import ReceivingGroup, RolloutGroup, SendingGroup

if TYPE_CHECKING:
    from quadriga.single_controller import Backend, ClassWithInitArgs, ResourcePool, WorkerGroup
    from quadriga.weight_sync.sync import WeightNeeds

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
    _last_loss: QuadrigaError | None = field(default=None, init=False)

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

    def lose(self, replica: Replica, error: QuadrigaError) -> None:
        """End a replica, so that it neither answers late nor takes part in a weight sync."""
        if replica.loss is not None:
            return
        replica.loss = error
        self._last_loss = error
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


@dataclass(frozen=True)
class ReplicaLink:
    """From the actor to the replicas, through the store of the backend.

    The ranks of the actor send once, whatever the number of replicas: each replica reads the parts
    of a round by their handles. A replica that is lost meanwhile is left out. One that was lost
    before is started again first, if it may be, and so gets the same weights as the others.
    """

    sender: SendingGroup
    replicas: Replicas

    def sync(self) -> None:
        """Copy all weights, then compare digests on every rank of every replica.

        Raises:
            WorkerError: names the weights that are missing or differ, or the replicas hold several
                versions.
            RolloutDiedError: all replicas are lost.
        """
        replicas = self.replicas
        replicas.restart_lost()
        replicas.collect(replicas.submit(lambda group: group.weight_needs.submit()))
        replicas.restart_lost()  # those that died since, as this call has shown
        every = replicas.collect(replicas.submit(lambda group: group.weight_needs.submit()))
        found = [
            needs for per_rank in every.values() for needs in cast("list[WeightNeeds]", per_rank)
        ]
        # One that was started again may need more than the others; all receive what it needs.
        needs = next((needs for needs in found if needs.part == "unmerged"), found[0])
        reading: dict[DataProtoFuture, Replica] = {}
        with closing(self.sender.send_weights.stream(needs)) as rounds:
            for parts in rounds:
                replicas.collect(reading)  # two rounds at most are in the store
                reading = replicas.submit(partial(_receive, parts))
        replicas.collect(reading)
        finished = replicas.collect(replicas.submit(lambda group: group.finish_weights.submit()))
        versions = {v for per_rank in finished.values() for v in cast("list[int]", per_rank)}
        if len(versions) != 1:
            raise WorkerError(
                f"after a weight sync the replicas of the rollout hold the versions "
                f"{sorted(versions)}, expected one"
            )
        replicas.version = versions.pop()


def _receive(parts: list[DataProto], group: ReplicaGroup) -> DataProtoFuture:
    return group.receive_weights.submit(parts)


def are_replicas(config: TrainConfig, uses: Sequence[str]) -> bool:
    """Return whether the ranks of a pool with these uses are replicas of the rollout."""
    return config.actor_rollout_ref.rollout.replicas.enable and "rollout" in uses


def start_replicas(
    settings: RolloutEngineConfig,
    backend: Backend,
    pool: ResourcePool,
    members: Mapping[str, ClassWithInitArgs],
    started: list[WorkerGroup],
    *,
    timeout: float | None,
) -> Replicas:
    """Start one worker group for each copy of the weights that the ranks of a pool can hold.

    The groups are not watched: the loss of a replica ends no run.

    Args:
        settings: of the rollout.
        members: worker key → class with its arguments; one entry.
        started: receives every group, also those that are started again later.
        timeout: the deadline of a call, in seconds.

    Raises:
        ConfigError: another role runs on these ranks.
    """
    if len(members) != 1:
        key = "actor_rollout_ref.rollout.replicas.enable"
        raise ConfigError(
            f"{key}=true needs ranks on which only the rollout runs, but the workers of its pool "
            f"are {sorted(members)}; map Role.Rollout to a pool of its own, or set it to false",
            key=key,
        )
    parts = split_resource_pool(pool, rollout_of(settings).ranks_of_copy)
    (role,) = members

    def start(number: int) -> ReplicaGroup:
        group: WorkerGroup = backend.worker_group(
            parts[number], backend.colocate(members), timeout=timeout
        )
        started.append(group)
        view: ReplicaGroup = group.spawn([role])[role]
        return view

    return Replicas(start, len(parts), settings.replicas.restarts)
