"""Generation by replicas: rows are asked of them in requests, and each row is answered once.

consumes      a batch of prompts, and the replicas
produces      the responses in the order of the prompts
waits for     the replicas, each with a few requests in flight
unblocked by  an answer; the loss of a replica, whose rows another one is then asked for; the
              deadline of a call (`trainer.call_timeout_s`), which is such a loss. Each loss takes a
              replica away, so the wait ends: with all answers, or without a replica.

A replica that works faster, or has shorter responses, is asked more often. Which replica is asked
changes no response, as far as the engine is independent of the batch (`abilities`).

Prefix affinity: which replica has computed the beginning of a prompt before.
An engine with a prefix cache computes the tokens of a prompt once, and continues from them. The
next turn of a conversation begins with the turn before it, so it is asked of the same replica. The
idea of comparing the matched share with a bound is that of SGLang's cache-aware router.

The router keeps hashes and no tokens. A prefix of k tokens t has the hash

    H(k) = Σ (t[i] + 1) · B^i modulo 2^64,   i = 0 … k − 1

so that the hashes of all prefixes of a prompt are one cumulative sum. Each prompt is noted at
multiples of `BLOCK` tokens and at its end:

    first turn    20 tokens                      noted: H(16) H(20)
    second turn   those 20, then 15 more (35)    found: H(20), a share of 20 / 35 = 0.57
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quadriga.config.schema import ReplicasConfig
from quadriga.errors import QuadrigaError, RolloutOutputError
from quadriga.protocol import DataProto, DataProtoFuture, fields
from quadriga.trainer.replicas.replica import FROM_FOLDER, Replica, Replicas, is_loss

BLOCK = 16
"""Tokens between two prefixes that are noted of one prompt."""
LIMIT = 1 << 18
"""How many prefixes are kept. Those that were noted first are dropped first."""
_BASE = 6364136223846793005  # odd, so that no power of it is 0 modulo 2^64


class PrefixHashes:
    """The hashes of all prefixes of one prompt."""

    def __init__(self, tokens: Sequence[int] | npt.NDArray[np.int64]) -> None:
        values = np.asarray(tokens, dtype=np.uint64) + np.uint64(1)
        powers = np.full(len(values), _BASE, dtype=np.uint64)
        powers[:1] = 1
        # uint64 arithmetic of arrays wraps around, which is the arithmetic modulo 2^64.
        self._sums = np.cumsum(values * np.cumprod(powers, dtype=np.uint64), dtype=np.uint64)
        self.length = len(values)

    def of(self, length: int) -> tuple[int, int]:
        """Return the key of the prefix of `length` tokens."""
        return length, int(self._sums[length - 1])


class PrefixRouter:
    """Knows which replica was asked last for a prefix.

    Args:
        share: of the tokens of a prompt that a replica must have computed before to be preferred.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._last: OrderedDict[tuple[int, int], int] = OrderedDict()

    def preferred(self, prompt: PrefixHashes) -> int | None:
        """Return the number of the replica with the longest prefix of a prompt, if it is long
        enough."""
        # Of a noted prompt all multiples of BLOCK are noted, so the longest one is found by halving
        # the range. Its end is less than a block behind: 20 tokens are noted at 16 and 20.
        low, high = 0, prompt.length // BLOCK
        while low < high:
            middle = (low + high + 1) // 2
            if prompt.of(middle * BLOCK) in self._last:
                low = middle
            else:
                high = middle - 1
        longest = min(prompt.length, low * BLOCK + BLOCK - 1)
        least = max(1, math.ceil(self._share * prompt.length), low * BLOCK)
        for length in range(longest, least - 1, -1):
            replica = self._last.get(prompt.of(length))
            if replica is not None:
                return replica
        return None

    def note(self, prompt: PrefixHashes, replica: int) -> None:
        """Note that a replica computes a prompt."""
        # From the longest on, so that the shortest prefixes are dropped last.
        for length in sorted({*range(BLOCK, prompt.length, BLOCK), prompt.length}, reverse=True):
            key = prompt.of(length)
            self._last[key] = replica
            self._last.move_to_end(key)
        while len(self._last) > LIMIT:
            self._last.popitem(last=False)

    def forget(self, replica: int | None = None) -> None:
        """Forget what a replica has computed; None: what all have, as after new weights."""
        for key in [k for k, r in self._last.items() if replica is None or r == replica]:
            del self._last[key]


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02
_REQUESTS_PER_REPLICA = 4
"""Into how many requests the rows of a replica are divided, if `request_rows` does not say it."""


@dataclass(frozen=True, eq=False)
class SamePrompt:
    """Rows with equal prompt tokens. One replica is asked for all of them together."""

    rows: tuple[int, ...]
    prompt: PrefixHashes


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
    return [SamePrompt(tuple(rows), PrefixHashes(tokens)) for tokens, rows in found.items()]


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
                self._send()
                for ended in self._ended():
                    self._receive(ended)
        finally:
            for left in self._asked:  # after an error: no answer is waited for
                left.future.cancel()
        order = np.concatenate([np.array(rows) for rows, _ in self._answers])
        assert len(order) == len(self._prompts) == len(set(order.tolist())), "each row once"
        together = DataProto.concat([rows for _, rows in self._answers])
        return together.select_idxs(np.argsort(order))

    def _send(self) -> None:
        """Ask replicas that have room, the one with the fewest rows first."""
        while self._waiting:
            load = dict.fromkeys(self.replicas.working, 0)
            calls = dict.fromkeys(load, 0)
            for asked in self._asked:
                load[asked.replica] += len(asked.rows)
                calls[asked.replica] += 1
            free = [r for r in load if calls[r] < self._calls]
            for replica in sorted(free, key=lambda r: (load[r], r.number)):
                members = self._chosen(replica, free, idle=not calls[replica])
                if members:
                    self._ask(members, replica)
                    break
            else:
                return

    def _chosen(
        self, replica: Replica, free: list[Replica], *, idle: bool
    ) -> tuple[SamePrompt, ...]:
        """Return the rows for a replica: those that prefer it, then those that prefer none.

        A prompt that prefers another replica waits for it, unless that one has all its requests in
        flight and this one would have nothing to do.
        """
        working = {r.number for r in self.replicas.working}
        with_room = {r.number for r in free}
        found = {member: self._router.preferred(member.prompt) for member in self._waiting}
        preferred = {m: number if number in working else None for m, number in found.items()}
        wishes: list[Callable[[int | None], bool]] = [
            lambda number: number == replica.number,
            lambda number: number is None,
            lambda number: idle and number not in with_room,
        ]
        for wish in wishes:
            # The rows of a prompt are not divided, so a request can have more than it should.
            taken: list[SamePrompt] = []
            count = 0
            for member in [m for m in self._waiting if wish(preferred[m])]:
                if count < self._rows and (not taken or count + len(member.rows) <= self._rows):
                    taken.append(member)
                    count += len(member.rows)
            if taken:
                return tuple(taken)
        return ()

    def _ask(self, members: tuple[SamePrompt, ...], replica: Replica) -> None:
        for member in members:
            self._waiting.remove(member)
            self._router.note(member.prompt, replica.number)
        rows = self._prompts.select_idxs(np.array(_rows_of(members)))
        try:
            future = replica.group.generate_sequences.submit(rows)
        except QuadrigaError as error:
            self._fail(replica, error, members)
            return
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
            return
        self._answers.append((ended.rows, answer))

    def _fail(
        self, replica: Replica, error: QuadrigaError, members: tuple[SamePrompt, ...]
    ) -> None:
        """Lose a replica, and let all rows of which it was asked wait again, before the others.
        Raise other errors."""
        if not is_loss(error):
            raise error
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
        if len(answer) != rows:
            fault, version = "missing row", None
            problem = f"a replica was asked for {rows} responses and returned {len(answer)}"
        elif expected is not None and found != [expected]:
            fault, version = "weight version", found[0]
            problem = (
                f"the weights of version {', '.join(map(str, found))} sampled an answer, but the "
            ) + (
                "replicas have those of the model folder (version -1)"
                if expected == FROM_FOLDER
                else f"last weight sync gave version {expected}"
            )
        else:
            return
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
