"""A rollout of replicas: worker groups with an engine each, which are asked independently.

    rows of a call ──► prompts ──► requests ──► replica 0, 1, …
                          ▲                              │
                          └──── a replica is lost ◄──────┴──► answers ──► rows in their order

consumes      a batch of prompts, and the replicas
produces      the responses in the order of the prompts; each row is answered once
waits for     the replicas, each with a few requests in flight
unblocked by  an answer; the loss of a replica, whose rows another one is then asked for; the
              deadline of a call (`trainer.call_timeout_s`), which is such a loss. Each loss takes a
              replica away, so the wait ends: with all answers, or without a replica.

A replica that works faster, or has shorter responses, is asked more often. Which replica is asked
changes no response, as far as the engine is independent of the batch (`abilities`).
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from quadriga.backends import profiler_options
from quadriga.config.role_ranks import has_replicas
from quadriga.config.schema import RolloutEngineConfig, RunConfig, TrainConfig
from quadriga.errors import (
    CallTimeoutError,
    InputError,
    QuadrigaError,
    RolloutDiedError,
    RolloutError,
    RolloutOutputError,
    WorkerDiedError,
    WorkerError,
    WorkerInitError,
    WorkerMethodError,
    first_line,
)
from quadriga.protocol import DataProto, DataProtoFuture, as_completed, fields
from quadriga.rollout import rollout_of
from quadriga.single_controller import split_resource_pool
from quadriga.workers.roles import RolloutGroup, SendingGroup, StagingGroup

if TYPE_CHECKING:
    from quadriga.single_controller import Backend, ClassWithInitArgs, ResourcePool, WorkerGroup
    from quadriga.weight_sync.transport import WeightNeeds

_log = logging.getLogger("quadriga")

Applying = Callable[[], AbstractContextManager[None]]
FROM_FOLDER = -1
"""The version of weights that an engine has loaded from the folder of its model."""
_REQUESTS_PER_REPLICA = 4
"""Into how many requests the rows of a replica are divided, if `request_rows` does not say it."""


_FAILED_STARTS = 3
"""After so many starts in a row that have failed, an elastic replica is not started any more."""


class ReplicaGroup(RolloutGroup, StagingGroup, Protocol):
    """The worker group of one replica: one rank, or the ranks that hold one copy together."""

    def shutdown(self) -> None:
        """End its processes."""
        ...


@dataclass(eq=False)
class Replica:
    """One replica. After a loss another one takes its place.

    Attributes:
        number: from 0, for messages. One that is started again keeps it.
        group: its ranks.
        loss: why it is lost; None: it works.
        starts: how often a replica of this number was started.
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
        room: whether the cluster has free resources for replica `number` now; replicas then join
            and come back without counting as restarts. None: their number stays.
        least: fewer working replicas are an error.
        most: replicas that there can be; None: `count`.
    """

    start: Callable[[int], ReplicaGroup]
    count: int
    restarts: int = 0
    room: Callable[[int], bool] | None = None
    least: int = 1
    most: int | None = None
    all: list[Replica] = field(init=False)
    version: int | None = field(default=None, init=False)
    """The version of the weights that all working replicas hold, as of the last weight sync.
    `FROM_FOLDER`: no sync is to come. None: the first one has not come yet."""
    _last_loss: QuadrigaError | None = field(default=None, init=False)
    _failed: Counter[int] = field(default_factory=Counter, init=False)  # starts in a row, by number

    def __post_init__(self) -> None:
        self.all = [Replica(number, self.start(number)) for number in range(self.count)]

    @property
    def working(self) -> list[Replica]:
        """The replicas that are not lost.

        Raises:
            RolloutDiedError: fewer than `least` are left. Its cause is the loss of the last one.
        """
        found = [replica for replica in self.all if replica.loss is None]
        if len(found) < self.least:
            reasons = "; ".join(
                f"replica {r.number}: {first_line(r.loss)}" for r in self.all if r.loss
            )
            lost = f"all {len(self.all)} replicas of the rollout are lost"
            if self.least > 1:
                lost = f"fewer than min_count={self.least} replicas of the rollout are left"
            raise RolloutDiedError(f"{lost}. {reasons}") from self._last_loss
        return found

    def lose(self, replica: Replica, error: QuadrigaError) -> None:
        """End a replica, so that it neither answers late nor takes part in a weight sync.

        Raises:
            QuadrigaError: `error`, if it is no loss (`is_loss`).
        """
        if not is_loss(error):
            raise error
        if replica.loss is not None:
            return
        replica.loss = self._last_loss = error
        left = sum(r.loss is None for r in self.all)
        _log.warning(
            "replica %d of the rollout is lost, %d of %d are left: %s",
            replica.number, left, len(self.all), first_line(error),
        )  # fmt: skip
        try:
            replica.group.shutdown()
        except QuadrigaError as problem:
            _log.warning("replica %d did not end: %s", replica.number, first_line(problem))

    def to_start(self) -> Iterator[int]:
        """Yield the numbers of the lost replicas, and of a new one, that may be started now."""
        for number in range(min(len(self.all) + 1, self.most or self.count)):
            if number < len(self.all) and self.all[number].loss is None:
                continue
            if self.room is None:
                if self.restarts > 0:
                    yield number
            elif self._failed[number] < _FAILED_STARTS and self.room(number):
                yield number

    def restart_lost(self) -> None:
        """Start lost replicas again, and a new one, as long as `restarts` or `room` allows. They
        hold the weights of the model folder then; in training the caller syncs the weights next.

        A replica that does not start stays lost.
        """
        for number in self.to_start():
            lost = self.all[number] if number < len(self.all) else None
            if self.room is None:
                self.restarts -= 1
            group: ReplicaGroup | None = None
            try:
                group = self.start(number)
                group.init_model()
            except (WorkerError, InputError) as error:
                again = "" if lost is None else " again"
                _log.warning("replica %d cannot be started%s: %s", number, again, first_line(error))
                self._failed[number] += 1
                if self.room is not None and self._failed[number] >= _FAILED_STARTS:
                    text = "replica %d has failed to start %d times and is not tried again"
                    _log.warning(text, number, _FAILED_STARTS)
                with suppress(QuadrigaError):
                    if group is not None:
                        group.shutdown()
                continue
            self._failed[number] = 0
            if lost is None:
                self.all.append(Replica(number, group))
                _log.warning("replica %d of the rollout has joined", number)
            else:
                self.all[number] = Replica(number, group, starts=lost.starts + 1)
                _log.warning("replica %d of the rollout was started again", number)

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
                self.lose(replica, error)
        return calls

    def collect(self, calls: Mapping[DataProtoFuture, Replica]) -> list[object]:
        """Wait for calls of several replicas; return the results of those that work.

        Waits for: every call. Unblocked by: its result, its error or its deadline.

        Raises:
            QuadrigaError: the first error that is not the loss of a replica.
            RolloutDiedError: all replicas are lost.
        """
        results: list[object] = []
        for future in as_completed(calls):
            try:
                results.append(future.get())
            except QuadrigaError as error:
                self.lose(calls[future], error)
        assert self.working, "it raises if too few are left"
        return results


def is_loss(error: QuadrigaError) -> bool:
    """Return whether an error of a call means that its replica cannot be used again.

    The process has ended or is stuck, or its engine has failed. Input that an engine refuses and
    errors of the program are no loss: another replica would raise them too.
    """
    if isinstance(error, WorkerDiedError | CallTimeoutError | WorkerInitError):
        return True
    cause = error.__cause__ if isinstance(error, WorkerMethodError) else error
    return isinstance(cause, RolloutError) and not isinstance(cause, InputError)


@dataclass(frozen=True)
class ReplicaLink:
    """From the actor to the replicas, through the store of the backend.

    The ranks of the actor send once, whatever the number of replicas: each replica reads the parts
    of a round by their handles. A replica that is lost meanwhile is left out. One that was lost
    before is started again first, if it may be, and so gets the same weights as the others.
    """

    sender: SendingGroup
    replicas: Replicas

    def sync(self, applying: Applying | None = None) -> None:
        """Copy all weights, then compare digests on every rank of every replica.

        Args:
            applying: the replicas generate meanwhile. They copy the weights to other memory, and
                use them after the calls that were submitted before this context.

        Raises:
            WorkerError: names the weights that are missing or differ, or the replicas hold several
                versions.
            RolloutDiedError: all replicas are lost.
        """
        replicas = self.replicas
        every: list[object] = []
        # The first call shows which replicas have died since the last one.
        for _ in range(2 if applying is None else 1):
            if applying is None:
                replicas.restart_lost()
            every = replicas.collect(replicas.submit(lambda group: group.weight_needs.submit()))
        found = [needs for per_rank in every for needs in cast("list[WeightNeeds]", per_rank)]
        # One that was started again may need more than the others; all receive what it needs.
        needs = next((needs for needs in found if needs.part == "unmerged"), found[0])
        reading: dict[DataProtoFuture, Replica] = {}
        with closing(self.sender.send_weights.stream(needs)) as rounds:
            for parts in rounds:
                replicas.collect(reading)  # two rounds at most are in the store
                reading = replicas.submit(partial(_receive, parts, applying is not None))
        replicas.collect(reading)
        with nullcontext() if applying is None else applying():
            finishing = replicas.submit(lambda group: group.finish_weights.submit())
        finished = replicas.collect(finishing)
        versions = {v for per_rank in finished for v in cast("list[int]", per_rank)}
        if len(versions) != 1:
            raise WorkerError(
                f"after a weight sync the replicas of the rollout hold the versions "
                f"{sorted(versions)}, expected one"
            )
        replicas.version = versions.pop()


def _receive(parts: list[DataProto], stage: bool, group: ReplicaGroup) -> DataProtoFuture:
    return (group.stage_weights if stage else group.receive_weights).submit(parts)


def are_replicas(config: TrainConfig, uses: Sequence[str]) -> bool:
    """Return whether the ranks of a pool with these uses are replicas of the rollout."""
    return has_replicas(config) and "rollout" in uses


def start_replicas(
    settings: RolloutEngineConfig,
    backend: Backend,
    pool: ResourcePool,
    members: Mapping[str, ClassWithInitArgs],
    started: list[WorkerGroup],
    trainer: RunConfig,
) -> Replicas:
    """Start one worker group for each copy of the weights that the ranks of a pool can hold.

    The groups are not watched: the loss of a replica ends no run.

    Args:
        settings: of the rollout.
        members: worker key → class with its arguments; one entry.
        started: receives every group, also those that are started again later.
        trainer: its `call_timeout_s` is the deadline of a call.
    """
    parts = split_resource_pool(pool, rollout_of(settings).ranks_of_copy)
    count, elastic = len(parts), settings.replicas
    (role,), options = members, profiler_options(trainer)
    options["timeout"] = trainer.call_timeout_s

    def start(number: int) -> ReplicaGroup:
        cls = backend.colocate(members)
        group: WorkerGroup = backend.worker_group(parts[number], cls, **options)
        started.append(group)
        view: ReplicaGroup = group.spawn([role])[role]
        return view

    def room(number: int) -> bool:
        if number < len(parts):  # of a replica that was lost
            return backend.is_placed(parts[number])
        if (free := backend.pool_in_free_room(parts[0])) is not None:
            parts.append(free)
        return free is not None

    if not elastic.elastic:
        return Replicas(start, count, elastic.restarts)
    most = max(count, elastic.max_count or 2 * count)
    return Replicas(start, count, elastic.restarts, room, elastic.min_count, most)


# Generation.


Rows = tuple[int, ...]
"""Numbers of rows with equal prompt tokens. One replica is asked for all of them together, whose
prefix cache then computes the prompt once."""


def same_prompts(prompts: DataProto) -> list[Rows]:
    """Return the rows of a batch by prompt, in the order of the first row of each.

    Padding does not count: two rows with the same tokens behind different padding are together.
    """
    ids = prompts.batch[fields.INPUT_IDS].cpu().numpy()
    mask = prompts.batch[fields.ATTENTION_MASK].cpu().numpy().astype(bool)
    found: dict[tuple[int, ...], list[int]] = {}
    for row in range(len(ids)):
        found.setdefault(tuple(ids[row][mask[row]].tolist()), []).append(row)
    return [tuple(rows) for rows in found.values()]


class ReplicatedRollout:
    """A rollout of replicas, with the methods of the worker group of a rollout.

    Args:
        replicas: the worker groups.
        settings: of the rollout.
    """

    def __init__(self, replicas: Replicas, settings: RolloutEngineConfig) -> None:
        self.replicas = replicas
        self._settings = settings

    @property
    def world_size(self) -> int:
        """1: any number of rows can be generated."""
        return 1

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Sample one response per row: `ActorRolloutRefWorker.generate_sequences` of the replicas.

        Without a weight sync to come, lost replicas are started again first: they have the right
        weights as soon as they have loaded the model folder.

        Raises:
            RolloutDiedError: all replicas are lost. Its cause is the last loss.
            QuadrigaError: as a call of the worker's method, if another replica would raise it too.
        """
        if self.replicas.version == FROM_FOLDER:
            self.replicas.restart_lost()
        if not len(prompts):
            return self.replicas.working[0].group.generate_sequences(prompts)
        share = math.ceil(len(prompts) / (_REQUESTS_PER_REPLICA * len(self.replicas.working)))
        settings = self._settings.replicas
        rows = settings.request_rows or min(self._settings.micro_batch_size, share)
        return _Call(self.replicas, settings.requests_in_flight, prompts, rows).run()


class _Call:
    """The rows of one call. Each is waiting, asked of a replica, or answered:

    waiting ──ask──► asked ──receive──► answered
       ▲               │
       └─────fail──────┘   its replica is lost
    """

    def __init__(self, replicas: Replicas, calls: int, prompts: DataProto, rows: int) -> None:
        self.replicas, self._calls = replicas, calls
        self._prompts, self._rows = prompts, rows
        self._waiting = deque(same_prompts(prompts))
        self._asked: dict[DataProtoFuture, tuple[Replica, list[Rows]]] = {}
        self._answers: list[tuple[list[int], DataProto]] = []

    def run(self) -> DataProto:
        """Return the answers of all rows, in the order of the rows of the call."""
        try:
            while self._waiting or self._asked:
                while self._send():
                    pass
                for future in islice(as_completed(list(self._asked)), 1):
                    self._receive(future)
        finally:
            for left in self._asked:  # after an error: no answer is waited for
                left.cancel()
        order = np.concatenate([np.array(rows) for rows, _ in self._answers])
        assert len(order) == len(self._prompts) == len(set(order.tolist())), "each row once"
        joined = DataProto.concat([rows for _, rows in self._answers])
        return joined.select_idxs(np.argsort(order))

    def _send(self) -> bool:
        """Ask the replica with the fewest rows that has room. Return whether one was asked."""
        load = dict.fromkeys(self.replicas.working, 0)
        calls = dict.fromkeys(load, 0)
        for replica, prompts in self._asked.values():
            load[replica] += sum(map(len, prompts))
            calls[replica] += 1
        free = [replica for replica in load if calls[replica] < self._calls]
        if not free or not self._waiting:
            return False
        # The rows of a prompt are not divided, so a request can have more than it should.
        taken = [self._waiting.popleft()]
        count = len(taken[0])
        while self._waiting and count + len(self._waiting[0]) <= self._rows:
            taken.append(self._waiting.popleft())
            count += len(taken[-1])
        replica = min(free, key=lambda replica: (load[replica], replica.number))
        rows = self._prompts.select_idxs(np.concatenate(taken))
        try:
            future = replica.group.generate_sequences.submit(rows)
        except QuadrigaError as error:
            self._fail(replica, error, taken)
        else:
            self._asked[future] = replica, taken
        return True

    def _receive(self, future: DataProtoFuture) -> None:
        replica, prompts = self._asked.pop(future)
        rows = [row for own in prompts for row in own]
        try:
            answer: DataProto = future.get()
            self._check(answer, len(rows))
        except QuadrigaError as error:
            self._fail(replica, error, prompts)
        else:
            self._answers.append((rows, answer))

    def _fail(self, replica: Replica, error: QuadrigaError, prompts: list[Rows]) -> None:
        """Lose a replica, and let all rows of which it was asked wait again, before the others.
        Raise other errors."""
        self.replicas.lose(replica, error)
        again = list(prompts)
        for future, (asked, its_prompts) in list(self._asked.items()):
            if asked is replica:
                del self._asked[future]
                future.cancel()
                again += its_prompts
        self._waiting.extendleft(reversed(again))

    def _check(self, answer: DataProto, rows: int) -> None:
        if len(answer) != rows:
            problem = f"a replica was asked for {rows} responses and returned {len(answer)}"
            raise RolloutOutputError(problem, fault="missing row", row=None, version=None)
        expected = self.replicas.version
        found = sorted(set(answer.batch[fields.WEIGHT_VERSION].tolist()))
        if expected is not None and found != [expected]:
            problem = (
                f"the weights of version {', '.join(map(str, found))} sampled an answer, but the "
                f"last weight sync gave version {expected} ({FROM_FOLDER}: the model folder)"
            )
            raise RolloutOutputError(problem, fault="weight version", row=None, version=found[0])
