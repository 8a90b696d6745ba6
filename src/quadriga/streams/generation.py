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

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from quadriga.errors import QuadrigaError
from quadriga.protocol import (
    DataProto,
    DataProtoFuture,
    as_completed,
    fields,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)
from quadriga.streams.queue import PromptGroup, PromptQueue
from quadriga.streams.replicas import Replica, Replicas
from quadriga.workers.method_fields import BEGUN_RESPONSES

Rows = npt.NDArray[np.int64]
"""Numbers of rows within a prompt group."""
Members = list[tuple[PromptGroup, Rows]]
"""Groups, each with the numbers of its rows in a call, in the order of the call."""


@dataclass(frozen=True, eq=False)
class _Begun:
    """The rows that a replica continues, and what they have so far (`BEGUN_RESPONSES`)."""

    members: Members
    tokens: DataProto


@dataclass(frozen=True, eq=False)
class _Call:
    replica: Replica
    starts: int
    ended: int  # training steps that had ended at its start
    synced: int  # the step whose weights it has
    members: Members
    begun: _Begun | None
    future: DataProtoFuture
    padding: int
    began: float = field(default_factory=time.perf_counter)

    @property
    def is_lost(self) -> bool:
        return self.replica.loss is not None or self.replica.starts != self.starts


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
        note: records what decides on the tokens, as (event, numbers, steps that had ended): a
            "call" that has ended, with the group and the number in it of each row, its seconds, the
            number of its replica and the step of its weights; a "restart" of groups.

    Attributes:
        synced: the step whose weights a call has that starts now.
        moved: how many groups went on elsewhere, because their replica was lost.
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
    moved: int = field(default=0, init=False)
    synced: int = field(default=0, init=False)
    _begun: dict[Replica, _Begun] = field(default_factory=dict, init=False)
    _homeless: list[tuple[PromptGroup, Rows, DataProto]] = field(default_factory=list, init=False)
    _calls: dict[DataProtoFuture, _Call] = field(default_factory=dict, init=False)

    @property
    def busy(self) -> bool:
        """Whether a call is in flight."""
        return bool(self._calls)

    @property
    def begun(self) -> bool:
        """Whether some rows are paused between two calls."""
        return bool(self._begun or self._homeless)

    def paused_rows(self) -> tuple[Members, list[DataProto]]:
        """Return the rows that are paused between two calls, and what they have so far
        (`BEGUN_RESPONSES`), in parts."""
        found = list(self._begun.values())
        return [member for begun in found for member in begun.members], [b.tokens for b in found]

    def go_on(self, members: Members, tokens: Sequence[DataProto]) -> None:
        """Continue the rows of some groups, with the tokens of each group."""
        working = self.replicas.working
        for first, replica in enumerate(working):
            own = range(first, len(members), len(working))
            for i in own:
                members[i][0].place(replica)
            if own:
                of_own = DataProto.concat([tokens[i] for i in own])
                self._add(replica, _Begun([members[i] for i in own], of_own))

    def _add(self, replica: Replica, begun: _Begun | None) -> None:
        """Let a replica continue more rows."""
        held = self._begun.get(replica)
        if held is not None and begun is not None:
            tokens = DataProto.concat([held.tokens, begun.tokens])
            begun = _Begun([*held.members, *begun.members], tokens)
        if begun is not None:
            self._begun[replica] = begun

    def reclaim(self) -> None:
        """Let the rows of lost replicas go on elsewhere. A weight sync can lose one, too.

        The controller reads what they had when their last call ended. If the store has lost it, the
        group begins again. They wait for the calls in flight, so that the caches of all rows can be
        freed, as in a run that is repeated.
        """
        lost = {group: list[DataProto]() for group in self.queue.groups.values() if group.is_lost}
        for begun in self._left_behind() if lost else ():
            first = 0
            for group, rows in begun.members:
                own = begun.tokens.select_idxs(np.arange(len(rows)) + first)
                first += len(rows)
                lost[group].append(own)
                self._homeless.append((group, rows, own))
        for group, held in lost.items():
            held += [answers for _, answers in group.answers]
            held += [] if group.batch is None else [group.batch]
            if held and _readable(held):
                group.home = None
                self.moved += group.batch is None
        again = [group for group in lost if group.home is not None]
        self._homeless = [part for part in self._homeless if part[0] not in again]
        self.queue.restart(again)
        if known := [group.number for group in again if lost[group]]:  # of a call that has ended
            self.note("restart", known, self.queue.ended)
        if self._homeless and all(call.is_lost for call in self._calls.values()):
            self.forget_caches()
            self.note("forget", [], self.queue.ended)
            parts, self._homeless = self._homeless, []
            self.go_on([(g, rows) for g, rows, _ in parts], [own for *_, own in parts])

    def _left_behind(self) -> Iterator[_Begun]:
        """Yield the rows that lost replicas had before their last calls, once."""
        for replica, begun in list(self._begun.items()):
            if begun.members[0][0].is_lost:
                yield self._begun.pop(replica)
        for future, call in list(self._calls.items()):
            if call.is_lost and call.begun is not None:
                self._calls[future] = replace(call, begun=None)
                yield call.begun

    def submit(self, *, joins: bool = True) -> None:
        """Start a call on every replica without one, of its rows and of groups that wait.

        `joins`: groups that wait may start.
        """
        self.reclaim()
        if self._homeless:
            return
        at_work = {call.replica for call in self._calls.values()}
        idle = [replica for replica in self.replicas.working if replica not in at_work]
        begun = {replica: self._begun.pop(replica, None) for replica in idle}
        members: dict[Replica, Members] = {
            r: list(b.members) if b else [] for r, b in begun.items()
        }
        while joins and idle and self.queue.can_start:
            # One after the other, so that replicas which are idle together share the groups.
            replica = min(idle, key=lambda replica: _rows_of(members[replica]))
            count = len(self.queue.waiting[0].prompts)
            if members[replica] and _rows_of(members[replica]) + count > self.rows:
                break
            members[replica].append((self.queue.start(self.queue.waiting[0]), np.arange(count)))
        for replica in idle:
            if members[replica]:
                self._call(replica, members[replica], begun[replica])

    def _call(self, replica: Replica, members: Members, begun: _Begun | None) -> None:
        """Start a call. `begun`: the first rows; None: all rows begin."""
        rows = DataProto.concat([self.inputs(g.prompts.select_idxs(own)) for g, own in members])
        if begun is not None:
            new = _rows_of(members) - len(begun.tokens)
            tokens = [begun.tokens, self._no_tokens(new)] if new else [begun.tokens]
            rows = rows.union(DataProto.concat(tokens))
        of_rank = -(-self.rows // replica.group.world_size)
        rows.meta_info |= {"at_most": self.slice_tokens, "keep": min(of_rank, self.kept_rows)}
        for group, _ in members:
            group.place(replica)
        try:
            padded, padding = pad_dataproto_to_divisor(rows, replica.group.world_size)
            future = replica.group.generate_sequences.submit(padded)
        except QuadrigaError as error:
            self._add(replica, begun)
            self._lose(replica, error)
        else:
            ended = self.queue.ended
            self._calls[future] = _Call(
                replica, replica.starts, ended, self.synced, members, begun, future, padding
            )

    def repeat(self, rows: Sequence[tuple[int, int]]) -> list[PromptGroup]:
        """Make the call of another run, on one replica: the same rows in the same order. Return the
        groups that it has completed."""
        (replica,) = self.replicas.working
        groups = self.queue.groups
        held = self._begun.pop(replica, None)
        places = {} if held is None else _places(held.members)
        begun = [places[row] for row in rows if row in places]
        new = dict.fromkeys(number for number, row in rows if (number, row) not in places)
        for number in new:
            self.queue.start(groups[number])
        members = [
            (groups[number], np.array([row for _, row in own]))
            for number, own in groupby(rows, lambda row: row[0])
        ]
        self._call(replica, members, None if held is None else _selected(held, begun))
        (future,) = self._calls
        complete = self.keep(future)
        if held is not None:
            self._add(replica, _selected(held, sorted(set(places.values()) - set(begun))))
        return complete

    def forget(self, numbers: Sequence[int]) -> None:
        """Let groups begin again that have in another run."""
        self.queue.restart([self.queue.groups[number] for number in numbers])
        for replica, begun in list(self._begun.items()):
            rest = [place for (number, _), place in _places(begun.members).items()
                    if number not in numbers]  # fmt: skip
            del self._begun[replica]
            self._add(replica, _selected(begun, rest))

    def forget_caches(self) -> None:
        """Free the caches of paused rows. The next call computes their tokens again."""
        for replica, begun in list(self._begun.items()):
            none = self.inputs(begun.members[0][0].prompts[:0])
            none.meta_info["at_most"] = self.slice_tokens
            try:
                replica.group.generate_sequences(none)
            except QuadrigaError as error:
                self._lose(replica, error)

    def _no_tokens(self, rows: int) -> DataProto:
        """Return `BEGUN_RESPONSES` of rows that begin."""
        none = torch.zeros(rows, self.response_tokens, dtype=torch.int64)
        tensors = dict.fromkeys(BEGUN_RESPONSES, none)
        return DataProto.from_dict({**tensors, fields.ROLLOUT_LOG_PROBS: none.float()})

    def wait(self) -> DataProtoFuture | None:
        """Wait for the end of a call, and return its future; None: none is in flight."""
        return next(as_completed(list(self._calls)), None)

    def keep(self, ended: DataProtoFuture) -> list[PromptGroup]:
        """Keep the results of a call that has ended. Return the groups that it has completed."""
        self.reclaim()
        call = self._calls[ended]
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
        seconds = time.perf_counter() - call.began
        self.note("call", rows, call.ended, seconds=seconds, **about)
        complete = list(self._divided(call, answers))
        self.reclaim()
        return complete

    def _divided(self, call: _Call, answers: DataProto) -> Iterator[PromptGroup]:
        """Divide the rows of a call: some have ended, the others go on."""
        paused_B = answers.batch[fields.PAUSED].numpy().astype(bool)
        results = answers.select(
            [str(k) for k in answers.batch.keys() if k != fields.PAUSED]  # noqa: SIM118
        )
        members, first = Members(), 0
        for group, rows in call.members:
            paused = paused_B[first : first + len(rows)]
            if not paused.all():
                group.end(rows[~paused], results.select_idxs(first + np.flatnonzero(~paused)))
            if paused.any():
                members.append((group, rows[paused]))
            if group.batch is not None:
                yield group
            first += len(rows)
        if members:
            tokens = results.select(list(BEGUN_RESPONSES), meta_info_keys=[])
            self._add(call.replica, _Begun(members, tokens.select_idxs(paused_B)))

    def _lose(self, replica: Replica, error: QuadrigaError) -> None:
        """Lose a replica, and let its rows go on elsewhere."""
        if not self.loses:
            raise error
        self.replicas.lose(replica, error)
        self.reclaim()


def _places(members: Members) -> dict[tuple[int, int], int]:
    """Return (number of the group, row in it) → place among the rows."""
    rows = [(group.number, int(row)) for group, own in members for row in own]
    return {row: place for place, row in enumerate(rows)}


def _selected(begun: _Begun, places: Sequence[int]) -> _Begun | None:
    """Return the rows at some places; None: there are none."""
    rows = [(group, row) for group, own in begun.members for row in own]
    members = [(rows[place][0], np.array([rows[place][1]])) for place in places]
    return _Begun(members, begun.tokens.select_idxs(list(places))) if members else None


def _readable(parts: Sequence[DataProto]) -> bool:
    """Fetch all fields; return whether the store still has them."""
    try:
        for part in parts:
            part.prefetch()
    except QuadrigaError:
        return False
    return True


def _rows_of(members: Members) -> int:
    return sum(len(rows) for _, rows in members)
