"""Generation by replicas: rows are asked of them in requests, and each row is answered once.

consumes      a batch of prompts, and the replicas
produces      the responses in the order of the prompts
waits for     the replicas, each with a few requests in flight
unblocked by  an answer; the loss of a replica, whose rows another one is then asked for; the
              deadline of a call (`trainer.call_timeout_s`), which is such a loss. Each loss takes a
              replica away, so the wait ends: with all answers, or without a replica.

A replica that works faster, or has shorter responses, is asked more often. Which replica is asked
changes no response, as far as the engine is independent of the batch (`abilities`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from quadriga.config.schema import ReplicasConfig
from quadriga.errors import QuadrigaError, RolloutOutputError
from quadriga.protocol import DataProto, DataProtoFuture, fields
from quadriga.trainer.replicas.replica import FROM_FOLDER, Replica, Replicas, is_loss
from quadriga.trainer.replicas.routing import PrefixRouter
from quadriga.trainer.replicas.work import Request, SamePrompt, Work

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02
_REQUESTS_PER_REPLICA = 4
"""Into how many requests the rows of a replica are divided, if `request_rows` does not say it."""


@dataclass(frozen=True, eq=False)
class _InFlight:
    """A request to a replica."""

    request: Request
    replica: Replica
    future: DataProtoFuture


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
        work, in_flight = Work(prompts), list[_InFlight]()
        rows = self._rows_of_request(len(prompts))
        try:
            while not work.is_done:
                self._send(work, in_flight, rows)
                for ended in _ended(in_flight):
                    self._receive(work, in_flight, ended)
        finally:
            for left in in_flight:  # after an error: no answer is waited for
                left.future.cancel()
        return work.joined()

    def _rows_of_request(self, rows: int) -> int:
        share = math.ceil(rows / (_REQUESTS_PER_REPLICA * len(self.replicas.working)))
        return self._settings.request_rows or min(self._most_rows, share)

    def _send(self, work: Work, in_flight: list[_InFlight], rows: int) -> None:
        """Ask replicas that have room, the one with the fewest rows first."""
        while work.waiting:
            load = dict.fromkeys(self.replicas.working, 0)
            calls = dict.fromkeys(load, 0)
            for asked in in_flight:
                load[asked.replica] += len(asked.request.rows)
                calls[asked.replica] += 1
            free = [r for r in load if calls[r] < self._settings.requests_in_flight]
            for replica in sorted(free, key=lambda r: (load[r], r.number)):
                request = self._chosen(work, replica, rows, free, idle=not calls[replica])
                if request is not None:
                    self._ask(work, in_flight, request, replica)
                    break
            else:
                return

    def _chosen(
        self, work: Work, replica: Replica, rows: int, free: list[Replica], *, idle: bool
    ) -> Request | None:
        """Return the rows for a replica: those that prefer it, then those that prefer none.

        A prompt that prefers another replica waits for it, unless that one has all its requests in
        flight and this one would have nothing to do.
        """
        working = {r.number for r in self.replicas.working}
        with_room = {r.number for r in free}
        found = {member: self._router.preferred(member.prompt) for member in work.waiting}
        preferred = {m: number if number in working else None for m, number in found.items()}
        wishes: list[Callable[[SamePrompt], bool]] = [
            lambda member: preferred[member] == replica.number,
            lambda member: preferred[member] is None,
        ]
        if idle:
            wishes.append(lambda member: preferred[member] not in with_room)
        for wish in wishes:
            request = work.ask(rows, wish)
            if request is not None:
                return request
        return None

    def _ask(
        self, work: Work, in_flight: list[_InFlight], request: Request, replica: Replica
    ) -> None:
        for member in request.members:
            self._router.note(member.prompt, replica.number)
        try:
            future = replica.group.generate_sequences.submit(work.batch_of(request))
        except QuadrigaError as error:
            self._fail(work, in_flight, replica, error, [request])
            return
        in_flight.append(_InFlight(request, replica, future))

    def _receive(self, work: Work, in_flight: list[_InFlight], ended: _InFlight) -> None:
        if ended not in in_flight:  # its replica was lost by a request that ended before
            return
        in_flight.remove(ended)
        try:
            answer: DataProto = ended.future.get()
            self._check_version(answer)
            work.answer(ended.request, answer)
        except QuadrigaError as error:
            self._fail(work, in_flight, ended.replica, error, [ended.request])

    def _fail(
        self,
        work: Work,
        in_flight: list[_InFlight],
        replica: Replica,
        error: QuadrigaError,
        requests: list[Request],
    ) -> None:
        """Lose a replica, and let all rows of which it was asked wait again. Raise other errors."""
        if not is_loss(error):
            raise error
        self.replicas.lose(replica, error)
        self._router.forget(replica.number)
        own = [asked for asked in in_flight if asked.replica is replica]
        for asked in own:
            in_flight.remove(asked)
            asked.future.cancel()
        work.give_back([*requests, *(asked.request for asked in own)])

    def _check_version(self, answer: DataProto) -> None:
        expected = self.replicas.version
        if expected is None:
            return
        found = sorted(set(answer.batch[fields.WEIGHT_VERSION].tolist()))
        if found != [expected]:
            raise RolloutOutputError(
                f"the weights of version {', '.join(map(str, found))} sampled an answer, but the "
                + (
                    "replicas have those of the model folder (version -1)"
                    if expected == FROM_FOLDER
                    else f"last weight sync gave version {expected}"
                ),
                fault="weight version",
                row=None,
                version=found[0],
            )


def _ended(in_flight: list[_InFlight]) -> list[_InFlight]:
    """Wait until requests have ended, failed or exceeded their deadline, and return them."""
    pause = _FIRST_PAUSE_S
    while True:
        ended = [asked for asked in in_flight if asked.future.done()]
        if ended or not in_flight:
            return ended
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
