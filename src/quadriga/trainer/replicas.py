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
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import numpy.typing as npt

from quadriga.config.schema import ReplicasConfig, RolloutEngineConfig, TrainConfig
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
)
from quadriga.protocol import DataProto, DataProtoFuture, as_completed, fields
from quadriga.rollout import rollout_of
from quadriga.single_controller import split_resource_pool
from quadriga.workers.roles import ReceivingGroup, RolloutGroup, SendingGroup

if TYPE_CHECKING:
    from quadriga.single_controller import Backend, ClassWithInitArgs, ResourcePool, WorkerGroup
    from quadriga.weight_sync.transport import WeightNeeds

_log = logging.getLogger("quadriga")

FROM_FOLDER = -1
"""The version of weights that an engine has loaded from the folder of its model."""
BLOCK = 16
"""Tokens between two prefixes that are noted of one prompt."""
LIMIT = 1 << 18
"""How many prefixes are kept. Those that were noted first are dropped first."""
_BASE = 6364136223846793005  # odd, so that no power of it is 0 modulo 2^64
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02
_REQUESTS_PER_REPLICA = 4
"""Into how many requests the rows of a replica are divided, if `request_rows` does not say it."""


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
            raise self._none_left() from self._last_loss
        return found

    def _none_left(self) -> RolloutDiedError:
        reasons = "; ".join(f"replica {r.number}: {_line(r.loss)}" for r in self.all)
        return RolloutDiedError(f"all {self.count} replicas of the rollout are lost. {reasons}")

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
                replica.group = self.start(replica.number)
                replica.group.init_model()
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
        if calls and not results:
            raise self._none_left() from self._last_loss
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
        every: list[object] = []
        for _ in range(2):  # the first call shows which replicas have died since the last one
            replicas.restart_lost()
            every = replicas.collect(replicas.submit(lambda group: group.weight_needs.submit()))
        found = [needs for per_rank in every for needs in cast("list[WeightNeeds]", per_rank)]
        # One that was started again may need more than the others; all receive what it needs.
        needs = next((needs for needs in found if needs.part == "unmerged"), found[0])
        reading: dict[DataProtoFuture, Replica] = {}
        with closing(self.sender.send_weights.stream(needs)) as rounds:
            for parts in rounds:
                replicas.collect(reading)  # two rounds at most are in the store
                reading = replicas.submit(partial(_receive, parts))
        replicas.collect(reading)
        finished = replicas.collect(replicas.submit(lambda group: group.finish_weights.submit()))
        versions = {v for per_rank in finished for v in cast("list[int]", per_rank)}
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
    """
    parts = split_resource_pool(pool, rollout_of(settings).ranks_of_copy)
    (role,) = members

    def start(number: int) -> ReplicaGroup:
        cls = backend.colocate(members)
        group: WorkerGroup = backend.worker_group(parts[number], cls, timeout=timeout)
        started.append(group)
        view: ReplicaGroup = group.spawn([role])[role]
        return view

    return Replicas(start, len(parts), settings.replicas.restarts)


# Generation.


@dataclass(frozen=True, eq=False)
class SamePrompt:
    """Rows with equal prompt tokens. One replica is asked for all of them together.

    `prefixes`: (tokens, hash) of prefixes of the prompt, the longest one first.
    """

    rows: tuple[int, ...]
    prefixes: tuple[tuple[int, int], ...]


def prefixes_of(tokens: Sequence[int] | npt.NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Return (tokens, hash) of a prompt and of its prefixes of whole blocks, the longest first.

    A prefix of k tokens t has the hash H(k) = Σ (t[i] + 1) · B^i modulo 2^64, i = 0 … k − 1, so
    the hashes of all prefixes of a prompt are one cumulative sum.
    """
    values = np.asarray(tokens, dtype=np.uint64) + np.uint64(1)
    powers = np.full(len(values), _BASE, dtype=np.uint64)
    powers[:1] = 1
    # uint64 arithmetic of arrays wraps around, which is the arithmetic modulo 2^64.
    sums = np.cumsum(values * np.cumprod(powers, dtype=np.uint64), dtype=np.uint64)
    lengths = sorted({*range(BLOCK, len(values), BLOCK), len(values)} - {0}, reverse=True)
    return tuple((length, int(sums[length - 1])) for length in lengths)


class PrefixRouter:
    """Knows which replica was asked last for a prefix.

    An engine with a prefix cache computes the tokens of a prompt once, and continues from them. The
    next turn of a conversation begins with the turn before it, so it is asked of the same replica.
    The idea of comparing the matched share with a bound is that of SGLang's cache-aware router.

        first turn    40 tokens                      noted: H(40) H(32) H(16)
        second turn   those 40, then 16 more (56)    found: H(32), a share of 32 / 56 = 0.57

    Args:
        share: of the tokens of a prompt that a replica must have computed before to be preferred.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._last: OrderedDict[tuple[int, int], int] = OrderedDict()

    def preferred(self, prefixes: Sequence[tuple[int, int]]) -> int | None:
        """Return the number of the replica with the longest prefix, if it is long enough."""
        for key in prefixes:
            if key[0] < self._share * prefixes[0][0]:
                break
            if key in self._last:
                return self._last[key]
        return None

    def note(self, prefixes: Sequence[tuple[int, int]], replica: int) -> None:
        """Note that a replica computes a prompt."""
        for key in prefixes:  # the longest one first, so that the shortest is dropped last
            self._last[key] = replica
            self._last.move_to_end(key)
        while len(self._last) > LIMIT:
            self._last.popitem(last=False)

    def forget(self, replica: int | None = None) -> None:
        """Forget what a replica has computed; None: what all have, as after new weights."""
        for key in [k for k, r in self._last.items() if replica is None or r == replica]:
            del self._last[key]


@dataclass(frozen=True, eq=False)
class Request:
    """Rows of which a replica is asked."""

    members: tuple[SamePrompt, ...]
    replica: Replica
    future: DataProtoFuture

    @property
    def rows(self) -> list[int]:
        """The numbers of the rows in the call, in the order of the request."""
        return _rows_of(self.members)


def same_prompts(prompts: DataProto) -> list[SamePrompt]:
    """Return the rows of a batch by prompt, in the order of the first row of each.

    Padding does not count: two rows with the same tokens behind different padding are together.
    """
    ids = prompts.batch[fields.INPUT_IDS].cpu().numpy()
    mask = prompts.batch[fields.ATTENTION_MASK].cpu().numpy().astype(bool)
    found: dict[tuple[int, ...], list[int]] = {}
    for row in range(len(ids)):
        found.setdefault(tuple(ids[row][mask[row]].tolist()), []).append(row)
    return [SamePrompt(tuple(rows), prefixes_of(tokens)) for tokens, rows in found.items()]


class ReplicatedRollout:
    """A rollout of replicas, with the methods of the worker group of a rollout.

    Args:
        replicas: the worker groups.
        settings: `rollout.replicas`.
        most_rows: of one request, if `settings.request_rows` is None.
    """

    def __init__(self, replicas: Replicas, settings: ReplicasConfig, *, most_rows: int) -> None:
        self.replicas = replicas
        self._settings, self._most_rows = settings, most_rows
        self._router = PrefixRouter(settings.prefix_share)
        self._routed_version = replicas.version

    @property
    def world_size(self) -> int:
        """1: any number of rows can be generated."""
        return 1

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Sample one response per row: `ActorRolloutRefWorker.generate_sequences` of the replicas.

        Raises:
            RolloutDiedError: all replicas are lost. Its cause is the last loss.
            QuadrigaError: as a call of the worker's method, if another replica would raise it too.
        """
        if not len(prompts):
            return self.replicas.working[0].group.generate_sequences(prompts)
        if self.replicas.version != self._routed_version:  # engines have dropped their caches
            self._router.forget()
            self._routed_version = self.replicas.version
        share = math.ceil(len(prompts) / (_REQUESTS_PER_REPLICA * len(self.replicas.working)))
        rows = self._settings.request_rows or min(self._most_rows, share)
        call = _Call(self.replicas, self._router, self._settings.requests_in_flight, prompts, rows)
        return call.run()


class _Call:
    """The rows of one call. Each is waiting, asked of a replica, or answered:

    waiting ──ask──► asked ──receive──► answered
       ▲               │
       └─────fail──────┘   its replica is lost
    """

    def __init__(
        self, replicas: Replicas, router: PrefixRouter, calls: int, prompts: DataProto, rows: int
    ) -> None:
        self.replicas, self._router, self._calls = replicas, router, calls
        self._prompts, self._rows = prompts, rows
        self._waiting = deque(same_prompts(prompts))
        self._asked: list[Request] = []
        self._answers: list[tuple[list[int], DataProto]] = []

    def run(self) -> DataProto:
        """Return the answers of all rows, in the order of the rows of the call."""
        try:
            while self._waiting or self._asked:
                while self._send():
                    pass
                for ended in self._ended():
                    self._receive(ended)
        finally:
            for left in self._asked:  # after an error: no answer is waited for
                left.future.cancel()
        order = np.concatenate([np.array(rows) for rows, _ in self._answers])
        assert len(order) == len(self._prompts) == len(set(order.tolist())), "each row once"
        joined = DataProto.concat([rows for _, rows in self._answers])
        return joined.select_idxs(np.argsort(order))

    def _send(self) -> bool:
        """Ask the replica with the fewest rows that has room. Return whether one was asked."""
        load = dict.fromkeys(self.replicas.working, 0)
        calls = dict.fromkeys(load, 0)
        for asked in self._asked:
            load[asked.replica] += len(asked.rows)
            calls[asked.replica] += 1
        free = [r for r in load if calls[r] < self._calls]
        for replica in sorted(free, key=lambda r: (load[r], r.number)):
            if members := self._chosen(replica, free, idle=not calls[replica]):
                self._ask(members, replica)
                return True
        return False

    def _chosen(
        self, replica: Replica, free: list[Replica], *, idle: bool
    ) -> tuple[SamePrompt, ...]:
        """Return the rows for a replica: those that prefer it, then those that prefer none.

        A prompt that prefers another replica waits for it, unless that one has all its requests in
        flight and this one would have nothing to do.
        """
        working, with_room = ({r.number for r in rs} for rs in (self.replicas.working, free))
        by_wish: list[list[SamePrompt]] = [[], [], []]
        for member in self._waiting:
            number = self._router.preferred(member.prefixes)
            if number == replica.number:
                by_wish[0].append(member)
            elif number not in working:
                by_wish[1].append(member)
            elif idle and number not in with_room:
                by_wish[2].append(member)
        taken: list[SamePrompt] = []
        count = 0
        # The rows of a prompt are not divided, so a request can have more than it should.
        for member in next(filter(None, by_wish), []):
            if count < self._rows and (not taken or count + len(member.rows) <= self._rows):
                taken.append(member)
                count += len(member.rows)
        return tuple(taken)

    def _ask(self, members: tuple[SamePrompt, ...], replica: Replica) -> None:
        for member in members:
            self._waiting.remove(member)
            self._router.note(member.prefixes, replica.number)
        rows = self._prompts.select_idxs(np.array(_rows_of(members)))
        try:
            future = replica.group.generate_sequences.submit(rows)
        except QuadrigaError as error:
            self._fail(replica, error, members)
        else:
            self._asked.append(Request(members, replica, future))

    def _receive(self, ended: Request) -> None:
        if ended not in self._asked:  # its replica was lost by a request that ended before
            return
        self._asked.remove(ended)
        try:
            answer: DataProto = ended.future.get()
            self._check(answer, len(ended.rows))
        except QuadrigaError as error:
            self._fail(ended.replica, error, ended.members)
        else:
            self._answers.append((ended.rows, answer))

    def _fail(
        self, replica: Replica, error: QuadrigaError, members: tuple[SamePrompt, ...]
    ) -> None:
        """Lose a replica, and let all rows of which it was asked wait again, before the others.
        Raise other errors."""
        self.replicas.lose(replica, error)
        self._router.forget(replica.number)
        own = [asked for asked in self._asked if asked.replica is replica]
        for asked in own:
            self._asked.remove(asked)
            asked.future.cancel()
        again = [*members, *(member for asked in own for member in asked.members)]
        self._waiting.extendleft(reversed(again))

    def _check(self, answer: DataProto, rows: int) -> None:
        expected = self.replicas.version
        found = sorted(set(answer.batch[fields.WEIGHT_VERSION].tolist()))
        fault, version, problem = "weight version", found[0], ""
        if len(answer) != rows:
            fault, version = "missing row", None
            problem = f"a replica was asked for {rows} responses and returned {len(answer)}"
        elif expected is not None and found != [expected]:
            problem = (
                f"the weights of version {', '.join(map(str, found))} sampled an answer, but the "
                f"last weight sync gave version {expected} ({FROM_FOLDER}: the model folder)"
            )
        if problem:
            raise RolloutOutputError(problem, fault=fault, row=None, version=version)

    def _ended(self) -> list[Request]:
        """Wait until requests have ended, failed or exceeded their deadline, and return them."""
        pause = _FIRST_PAUSE_S
        while True:
            ended = [asked for asked in self._asked if asked.future.done()]
            if ended or not self._asked:
                return ended
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


def _rows_of(members: Sequence[SamePrompt]) -> list[int]:
    return [row for member in members for row in member.rows]
