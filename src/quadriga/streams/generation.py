"""Generates the responses of prompt groups on replicas, a slice of tokens at a time.

    groups that wait ──► rows of a replica ──call──► at most `slice_tokens` more tokens of each row
                               ▲                          │                │
                               └──────── paused ──────────┘                └──► ended

consumes      prompt groups, and the replicas
produces      complete groups; each row is ended once
waits for     the replicas, each with one call in flight
unblocked by  the end of a call, or its deadline (`trainer.call_timeout_s`), which is the loss of a
              replica. Groups with a row on a lost replica begin again on another one.

What an engine holds of a response between two calls can be computed again: the next call continues
the rows with the weights that the engine has then. So a weight sync, a checkpoint and the end of a
step need nothing but a pause between calls. New rows join at the next call (iteration-level
scheduling, Orca, OSDI 2022, with slices of several tokens as iterations).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    members: Members
    future: DataProtoFuture
    padding: int


class SlicedGeneration:
    """Generates the groups of a queue.

    Args:
        inputs: returns what generation reads, of rows of a group.
        slice_tokens: the most tokens of a row in one call.
        response_tokens: R, the columns of a response.
        rows: the most rows that a replica has at once.
        kept_rows: of how many rows a rank may keep the caches between two calls.
        loses: whether a replica may be lost; False: the error of its call is raised.
        note: records what decides on the tokens, as (event, numbers): a "call" with the group and
            the number in it of each row; a "restart" of groups.
    """

    def __init__(
        self,
        replicas: Replicas,
        queue: PromptQueue,
        inputs: Callable[[DataProto], DataProto],
        *,
        slice_tokens: int,
        response_tokens: int,
        rows: int,
        loses: bool,
        note: Callable[[str, Sequence[object]], None],
        kept_rows: int = 0,
    ) -> None:
        self.replicas, self.queue = replicas, queue
        self._inputs, self._loses, self._note = inputs, loses, note
        self._slice, self._columns, self._rows = slice_tokens, response_tokens, rows
        self._kept_rows = kept_rows
        self._begun: dict[Replica, _Begun] = {}
        self._calls: dict[DataProtoFuture, _Call] = {}

    @property
    def busy(self) -> bool:
        """Whether a call is in flight."""
        return bool(self._calls)

    @property
    def begun(self) -> bool:
        """Whether some rows are paused between two calls."""
        return bool(self._begun)

    def paused_rows(self) -> tuple[Members, list[DataProto]]:
        """Return the rows that are paused between two calls, and what they have so far
        (`BEGUN_RESPONSES`), in parts."""
        found = list(self._begun.values())
        return [member for begun in found for member in begun.members], [b.tokens for b in found]

    def go_on(self, members: Members, tokens: Sequence[DataProto]) -> None:
        """Continue the rows of some groups of another run, with the tokens of each group."""
        working = self.replicas.working
        for first, replica in enumerate(working):
            own = range(first, len(members), len(working))
            for i in own:
                members[i][0].place(replica)
            if own:
                of_own = DataProto.concat([tokens[i] for i in own])
                self._begun[replica] = _Begun([members[i] for i in own], of_own)

    def reclaim(self) -> None:
        """Let the groups of lost replicas begin again. A weight sync can lose one, too."""
        for replica, begun in list(self._begun.items()):
            if begun.members[0][0].is_lost:
                del self._begun[replica]
        if lost := self.queue.restart([g for g in self.queue.groups.values() if g.is_lost]):
            self._note("restart", lost)

    def submit(self) -> None:
        """Start a call on every replica without one, of its rows and of groups that wait."""
        self.reclaim()
        at_work = {call.replica for call in self._calls.values()}
        idle = [replica for replica in self.replicas.working if replica not in at_work]
        begun = {replica: self._begun.pop(replica, None) for replica in idle}
        members: dict[Replica, Members] = {
            r: list(b.members) if b else [] for r, b in begun.items()
        }
        while idle and self.queue.waiting:
            # One after the other, so that replicas which are idle together share the groups.
            replica = min(idle, key=lambda replica: _rows_of(members[replica]))
            count = len(self.queue.waiting[0].prompts)
            if members[replica] and _rows_of(members[replica]) + count > self._rows:
                break
            members[replica].append((self.queue.start(self.queue.waiting[0]), np.arange(count)))
        for replica in idle:
            if members[replica]:
                own = begun[replica]
                self._call(replica, members[replica], None if own is None else own.tokens)

    def _call(self, replica: Replica, members: Members, begun: DataProto | None) -> None:
        """Start a call. `begun`: what the first rows have so far; None: all rows begin."""
        rows = DataProto.concat([self._inputs(g.prompts.select_idxs(own)) for g, own in members])
        if begun is not None:
            new = _rows_of(members) - len(begun)
            tokens = [begun, self._no_tokens(new)] if new else [begun]
            rows = rows.union(DataProto.concat(tokens))
        of_rank = -(-self._rows // replica.group.world_size)
        rows.meta_info |= {"at_most": self._slice, "keep": min(of_rank, self._kept_rows)}
        for group, _ in members:
            group.place(replica)
        try:
            padded, padding = pad_dataproto_to_divisor(rows, replica.group.world_size)
            future = replica.group.generate_sequences.submit(padded)
        except QuadrigaError as error:
            self._lose(replica, error)
        else:
            self._calls[future] = _Call(replica, replica.starts, members, future, padding)
            self._note("call", [(g.number, int(row)) for g, own in members for row in own])

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
        tokens = None if held is None or not begun else held.tokens.select_idxs(begun)
        self._call(replica, members, tokens)
        (future,) = self._calls
        complete = self.keep(future)
        if held is not None and (rest := sorted(set(places.values()) - set(begun))):
            self._begun[replica] = _joined(held, rest, self._begun.get(replica))
        return complete

    def forget(self, numbers: Sequence[int]) -> None:
        """Let groups begin again that have in another run."""
        self.queue.restart([self.queue.groups[number] for number in numbers])
        for replica, begun in list(self._begun.items()):
            rest = [place for (number, _), place in _places(begun.members).items()
                    if number not in numbers]  # fmt: skip
            del self._begun[replica]
            if rest:
                self._begun[replica] = _joined(begun, rest, None)

    def forget_caches(self) -> None:
        """Free the caches of paused rows. The next call computes their tokens again."""
        for replica, begun in list(self._begun.items()):
            none = self._inputs(begun.members[0][0].prompts[:0])
            none.meta_info["at_most"] = self._slice
            try:
                replica.group.generate_sequences(none)
            except QuadrigaError as error:
                self._lose(replica, error)

    def _no_tokens(self, rows: int) -> DataProto:
        """Return `BEGUN_RESPONSES` of rows that begin."""
        none = torch.zeros(rows, self._columns, dtype=torch.int64)
        tensors = dict.fromkeys(BEGUN_RESPONSES, none)
        return DataProto.from_dict({**tensors, fields.ROLLOUT_LOG_PROBS: none.float()})

    def wait(self) -> DataProtoFuture | None:
        """Wait for the end of a call, and return its future; None: none is in flight."""
        return next(as_completed(list(self._calls)), None)

    def keep(self, ended: DataProtoFuture) -> list[PromptGroup]:
        """Keep the results of a call that has ended. Return the groups that it has completed."""
        call = self._calls.pop(ended)
        self.reclaim()
        if call.replica.loss is not None or call.replica.starts != call.starts:
            return []  # it was lost meanwhile
        try:
            answers: DataProto = unpad_dataproto(ended.get(), call.padding)
        except QuadrigaError as error:
            self._lose(call.replica, error)
            return []
        return list(self._divided(call, answers))

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
            self._begun[call.replica] = _Begun(members, tokens.select_idxs(paused_B))

    def _lose(self, replica: Replica, error: QuadrigaError) -> None:
        """Lose a replica. What it has generated is lost with it, so these groups begin again."""
        if not self._loses:
            raise error
        self.replicas.lose(replica, error)
        self.reclaim()


def _places(members: Members) -> dict[tuple[int, int], int]:
    """Return (number of the group, row in it) → place among the rows."""
    rows = [(group.number, int(row)) for group, own in members for row in own]
    return {row: place for place, row in enumerate(rows)}


def _joined(begun: _Begun, rest: Sequence[int], other: _Begun | None) -> _Begun:
    """Return the rows of `begun` at some places, then the rows of `other`."""
    rows = [(group, row) for group, own in begun.members for row in own]
    members = [(rows[place][0], np.array([rows[place][1]])) for place in rest]
    tokens = begun.tokens.select_idxs(list(rest))
    if other is None:
        return _Begun(members, tokens)
    return _Begun(members + list(other.members), DataProto.concat([tokens, other.tokens]))


def _rows_of(members: Members) -> int:
    return sum(len(rows) for _, rows in members)
