"""Generates the responses of prompt groups on replicas, a slice of tokens at a time.

    groups that wait ──► rows of a replica ──call──► at most `slice_tokens` more tokens of each row
                               ▲                          │                │
                               └──────── paused ──────────┘                └──► ended

consumes      prompt groups, and the replicas
produces      complete groups; each row is ended once
waits for     the replicas, each with one call in flight
unblocked by  the end of a call, or its deadline (`trainer.call_timeout_s`), which is the loss of a
              replica. Its rows go on elsewhere with the tokens that they had before this call.

What an engine holds of a response between two calls can be computed again: the next call continues
the rows with the weights that the engine has then. So a weight sync, a checkpoint and the end of a
step need nothing but a pause between calls. New rows join at the next call (iteration-level
scheduling, Orca, OSDI 2022, with slices of several tokens as iterations).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

from quadriga.errors import CallTimeoutError, QuadrigaError
from quadriga.protocol import (
    DataProto,
    DataProtoFuture,
    as_completed,
    fields,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)
from quadriga.streams.episodes import Episodes, Paused, Rows, begun_fields, no_tokens, with_routes
from quadriga.streams.queue import PromptGroup, PromptQueue
from quadriga.streams.replicas import Replica, Replicas

_LOOK_S, _WAIT_S = 0.02, 0.2
"""How often to look for answers of environments while a call is in flight, and how long to wait for
one if none is."""
_PATIENCE, _MOST_PATIENCE = 0.05, 0.5
"""The parts of the time of a call for which rows wait for the next answer of an environment, and
for all answers: a call of few rows takes nearly as long as one of all."""
Members = list[tuple[PromptGroup, Rows]]
"""Groups, each with the numbers of its rows in a call, in the order of the call."""


@dataclass(frozen=True, eq=False)
class _Call:
    replica: Replica
    ended: int  # training steps that had ended at its start
    synced: int  # the step whose weights it has
    members: Members
    begun: list[Paused]  # the first of its rows
    padding: int
    began: float = field(default_factory=time.perf_counter)

    @property
    def is_lost(self) -> bool:
        return self.replica.loss is not None


@dataclass(eq=False)
class SlicedGeneration:
    """Generates the groups of a queue.

    Args:
        inputs: returns what generation reads, of rows of a group.
        slice_tokens: the most tokens of a row in one call.
        response_tokens: R, the columns of a response.
        rows: the most rows that a replica has at once.
        kept_rows: of how many rows a rank may keep the caches between two calls.
        loses: whether a replica may be lost; False: the error of its call is raised.
        episodes: gives the turns of rows to environments; None: a row ends with its first turn.
        note: records what decides on the tokens, as (event, numbers, steps that had ended): a
            "call" that has ended, with the group and the number in it of each row, its seconds, the
            number of its replica and the step of its weights; a "restart" of groups.

    Attributes:
        synced: the step whose weights a call has that starts now.
        moved: how many groups went on elsewhere, because their replica was lost.
        paused: the rows between two calls.
    """

    replicas: Replicas
    queue: PromptQueue
    inputs: Callable[[DataProto], DataProto]
    slice_tokens: int
    response_tokens: int
    rows: int
    loses: bool
    note: Callable[..., None]
    kept_rows: int = 0
    episodes: Episodes | None = None
    moved: int = field(default=0, init=False)
    synced: int = field(default=0, init=False)
    paused: list[Paused] = field(default_factory=list, init=False)
    _calls: dict[DataProtoFuture, _Call] = field(default_factory=dict, init=False)
    _call_s: float = field(default=0.0, init=False)  # of the last call
    _since: float | None = field(default=None, init=False)  # when rows could have gone on
    _answered: float = field(default=0.0, init=False)  # when the last environment has answered

    @property
    def calling(self) -> bool:
        """Whether a call is in flight."""
        return bool(self._calls)

    @property
    def acting(self) -> bool:
        """Whether a row waits for its environment."""
        return self.episodes is not None and self.episodes.acting

    @property
    def has_rows(self) -> bool:
        """Whether a row has begun and has not ended."""
        return self.calling or self.acting or bool(self.paused)

    def go_on(self, parts: Sequence[Paused]) -> None:
        """Continue the rows of some groups, and give those a home that have none."""
        working = self.replicas.working
        for number, part in enumerate(parts):
            part.group.home = part.group.home or working[number % len(working)]
        self.paused += parts

    def _pop(self, numbers: Iterable[int]) -> list[Paused]:
        """Take the paused rows of some groups, in the order of the groups."""
        found = {number: list[Paused]() for number in numbers}
        rest = list[Paused]()
        for part in self.paused:
            found.get(part.group.number, rest).append(part)
        self.paused = rest
        return [part for parts in found.values() for part in parts]

    def reclaim(self) -> None:
        """Let the rows of lost replicas go on elsewhere. A weight sync can lose one, too.

        The controller reads what they had when their last call ended. If the store has lost it, the
        group begins again. They wait for the calls in flight, so that the caches of all rows can be
        freed, as in a run that is repeated.
        """
        lost = {group: list[DataProto]() for group in self.queue.groups.values() if group.is_lost}
        for call in self._calls.values() if lost else ():
            if call.is_lost:
                self.paused += call.begun
                call.begun.clear()
        for number, part in enumerate(self.paused):
            if part.group in lost:
                own = part.tokens
                self.paused[number] = Paused(part.group, part.rows, own, np.arange(len(own)))
                lost[part.group].append(own)
        for group, held in lost.items():
            held += [answers for _, answers in group.answers]
            held += [] if group.batch is None else [group.batch]
            held += [] if self.episodes is None else self.episodes.held(group)
            waits = self.episodes is not None and self.episodes.has(group)
            if (held or waits) and _readable(held):
                group.home = None
                self.moved += group.batch is None
        again = [group for group in lost if group.home is not None]
        self._restart(again)
        if known := [group.number for group in again if lost[group]]:  # of a call that has ended
            self.note("restart", known, self.queue.ended)
        if self._homeless() and all(call.is_lost for call in self._calls.values()):
            self.forget_caches()
            self.note("forget", [], self.queue.ended)
            self.go_on(self._pop([part.group.number for part in self._homeless()]))

    def _restart(self, groups: Sequence[PromptGroup]) -> None:
        self._pop([group.number for group in groups])
        if self.episodes is not None:
            self.episodes.forget(groups)
        self.queue.restart(groups)

    def _homeless(self) -> list[Paused]:
        return [part for part in self.paused if part.group.home is None]

    def _waits_for_others(self) -> bool:
        """Return whether rows that could go on wait for the environments of others."""
        if not (self.paused and self.acting) or self.calling:
            return False
        now = time.perf_counter()
        self._since = self._since or now
        next_s, all_s = (max(_LOOK_S, part * self._call_s) for part in (_PATIENCE, _MOST_PATIENCE))
        return now < min(max(self._since, self._answered) + next_s, self._since + all_s)

    def submit(self, *, joins: bool = True) -> None:
        """Start a call on every replica without one, of its rows and of groups that wait.

        `joins`: groups that wait may start.
        """
        self.reclaim()
        if self._homeless():
            return
        if joins:
            self._begin_episodes()
        if self._waits_for_others():
            return
        at_work = {call.replica for call in self._calls.values()}
        idle = [replica for replica in self.replicas.working if replica not in at_work]
        begun = {
            replica: self._pop([p.group.number for p in self.paused if p.group.home is replica])
            for replica in idle
        }
        if self.episodes is not None:  # more episodes than rows may be on their way
            for replica, parts in begun.items():
                sums = np.cumsum([len(part.rows) for part in parts])
                count = max(1, int((sums <= self.rows).sum()))
                self.paused += parts[count:]
                begun[replica] = parts[:count]
        rows = {replica: sum(len(part.rows) for part in begun[replica]) for replica in idle}
        new = {replica: list[PromptGroup]() for replica in idle}
        while joins and idle and self.queue.can_start and self.episodes is None:
            # One after the other, so that replicas which are idle together share the groups.
            replica = min(idle, key=lambda replica: rows[replica])
            count = len(self.queue.waiting[0].prompts)
            if rows[replica] and rows[replica] + count > self.rows:
                break
            new[replica].append(self.queue.start(self.queue.waiting[0]))
            rows[replica] += count
        for replica in idle:
            if rows[replica]:
                self._call(replica, begun[replica], new[replica])

    def close(self) -> None:
        """End the environments."""
        if self.episodes is not None:
            self.episodes.close()

    def _begin_episodes(self) -> None:
        """Begin the episodes of groups that wait."""
        episodes = self.episodes
        while episodes is not None and self.queue.can_start:
            if not episodes.has_room(len(self.queue.waiting[0].prompts)):
                return
            group = self.queue.start(self.queue.waiting[0])
            group.home = min(self.replicas.working, key=episodes.rows_of)
            episodes.begin(group)

    def _call(self, replica: Replica, begun: list[Paused], new: Sequence[PromptGroup]) -> None:
        """Start a call of rows that go on, and of groups that begin."""
        members = [
            (group, np.concatenate([part.rows for part in parts]))
            for group, parts in groupby(begun, lambda part: part.group)
        ]
        members += [(group, np.arange(len(group.prompts))) for group in new]
        # Most groups of episodes have one row.
        parts = [g.prompts if len(g.prompts) == 1 else g.prompts.select_idxs(r) for g, r in members]
        rows = DataProto.concat([self.inputs(part) for part in parts])
        if begun:
            of_calls = [list(own) for _, own in groupby(begun, lambda part: id(part.answers))]
            places = [np.concatenate([part.places for part in own]) for own in of_calls]
            tokens = [
                own[0].answers.select_idxs(p) for own, p in zip(of_calls, places, strict=True)
            ]
            if new:
                count = len(rows) - sum(map(len, tokens))
                tokens.append(DataProto.from_dict(no_tokens(count, self.response_tokens)))
            rows = rows.union(DataProto.concat(with_routes(tokens)))
        of_rank = -(-self.rows // replica.group.world_size)
        rows.meta_info |= {"at_most": self.slice_tokens, "keep": min(of_rank, self.kept_rows)}
        rows.meta_info["keep_ended"] = self.episodes is not None
        for group, _ in members:
            group.home = replica
        self._since = None
        try:
            padded, padding = pad_dataproto_to_divisor(rows, replica.group.world_size)
            future = replica.group.generate_sequences.submit(padded)
        except QuadrigaError as error:
            self.paused += begun
            self._lose(replica, error)
        else:
            ended = self.queue.ended
            self._calls[future] = _Call(replica, ended, self.synced, members, begun, padding)

    def repeat(self, rows: Sequence[tuple[int, int]]) -> list[PromptGroup] | None:
        """Make the call of another run on the first replica: the same rows in the same order.

        Return the groups that it has completed; None: this run does not have these rows to call.
        """
        replica, *_ = self.replicas.working
        numbers = dict.fromkeys(number for number, _ in rows)
        waiting = {group.number: group for group in self.queue.waiting}
        begun, new = self._pop(numbers), [waiting[n] for n in numbers if n in waiting]
        found = [(part.group.number, row) for part in begun for row in part.rows.tolist()]
        if [*found, *((g.number, row) for g in new for row in range(len(g.prompts)))] != rows:
            return None
        self._call(replica, begun, [self.queue.start(group) for group in new])
        (future,) = self._calls
        return self.keep(future)

    def forget(self, numbers: Sequence[int]) -> None:
        """Let groups begin again that have in another run."""
        self._restart([self.queue.groups[number] for number in numbers])

    def forget_caches(self) -> None:
        """Free the caches of rows between two calls. The next call computes their tokens again."""
        groups = [part.group for part in self.paused]
        groups += [] if self.episodes is None else self.queue.groups.values()
        homes = {group.home: group for group in groups}
        for replica, group in homes.items():
            if replica is None or replica.loss is not None:
                continue
            none = self.inputs(group.prompts[:0])
            none.meta_info["at_most"] = self.slice_tokens
            try:
                replica.group.generate_sequences(none)
            except QuadrigaError as error:
                self._lose(replica, error)

    def wait(self) -> DataProtoFuture | None:
        """Wait for the end of a call, and return its future; None: none is in flight, or an
        environment has answered before, or none has for a moment."""
        if self.episodes is None or not self.acting:
            return next(as_completed(list(self._calls)), None)
        while self._calls:
            with suppress(CallTimeoutError):
                return next(as_completed(list(self._calls), _LOOK_S))
            if self.episodes.wait(0.0):
                return None
        self.episodes.wait(_LOOK_S if self.paused else _WAIT_S)
        return None

    def keep(self, ended: DataProtoFuture | None) -> list[PromptGroup]:
        """Keep the results of a call that has ended, and the answers of environments. Return the
        groups that are complete now."""
        self.reclaim()
        complete = [] if ended is None else self._kept(self._calls[ended], ended)
        if self.episodes is not None:
            answered = self.episodes.collect()
            self._answered = time.perf_counter() if answered else self._answered
            self.paused += answered
            complete += self.episodes.complete()
        self.reclaim()
        return complete

    def _kept(self, call: _Call, ended: DataProtoFuture) -> list[PromptGroup]:
        try:
            answers = None if call.is_lost else unpad_dataproto(ended.get(), call.padding)
        except QuadrigaError as error:
            self._lose(call.replica, error)
            answers = None
        del self._calls[ended]
        if answers is None:
            return []
        rows = [(group.number, int(row)) for group, own in call.members for row in own]
        about = {"replica": call.replica.number, "synced": call.synced}
        self._call_s = time.perf_counter() - call.began
        self.note("call", rows, call.ended, seconds=self._call_s, **about)
        return list(self._divided(call, answers))

    def _divided(self, call: _Call, answers: DataProto) -> Iterator[PromptGroup]:
        """Divide the rows of a call: some have ended, the others go on."""
        paused_B = answers.batch[fields.PAUSED].numpy().astype(bool)
        results = answers.select(
            [str(k) for k in answers.batch.keys() if k != fields.PAUSED]  # noqa: SIM118
        )
        tokens = results.select(begun_fields(results), meta_info_keys=[])
        if self.episodes is not None:
            members = [(group, int(row)) for group, own in call.members for row in own]
            paused_B &= ~self.episodes.turn_ended(members, tokens)
            if len(act := np.flatnonzero(~paused_B)):
                self.episodes.act([members[i] for i in act], results.select_idxs(act))
        first = 0
        for group, rows in call.members:
            own = np.arange(len(rows)) + first
            paused = paused_B[own]
            if self.episodes is None and not paused.all():
                group.end(rows[~paused], results.select_idxs(own[~paused]))
            if paused.any():
                self.paused.append(Paused(group, rows[paused], tokens, own[paused]))
            if group.batch is not None:
                yield group
            first += len(rows)

    def _lose(self, replica: Replica, error: QuadrigaError) -> None:
        """Lose a replica, and let its rows go on elsewhere."""
        if not self.loses:
            raise error
        self.replicas.lose(replica, error)
        self.reclaim()


def _readable(parts: Sequence[DataProto]) -> bool:
    """Fetch all fields; return whether the store still has them."""
    try:
        for part in parts:
            part.prefetch()
    except QuadrigaError:
        return False
    return True
