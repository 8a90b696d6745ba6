"""The rows of one call: which wait, which are asked of a replica, and which are answered.

Every row is in exactly one of these states, and only an answer ends it:

    waiting ──ask──► asked ──answer──► answered
       ▲               │
       └───give_back───┘   its replica is lost
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from quadriga.errors import RolloutOutputError
from quadriga.protocol import DataProto, fields
from quadriga.trainer.replicas.routing import PrefixHashes


@dataclass(frozen=True, eq=False)
class SamePrompt:
    """Rows with equal prompt tokens. One replica is asked for all of them together."""

    rows: tuple[int, ...]
    prompt: PrefixHashes


@dataclass(frozen=True, eq=False)
class Request:
    """Rows of which one replica is asked."""

    members: tuple[SamePrompt, ...]

    @property
    def rows(self) -> list[int]:
        """The numbers of the rows in the call, in the order of the request."""
        return [row for member in self.members for row in member.rows]


def same_prompts(prompts: DataProto) -> list[SamePrompt]:
    """Return the rows of a batch by prompt, in the order of the first row of each.

    Padding does not count: two rows with the same tokens behind different padding are together.
    """
    ids = prompts.batch[fields.INPUT_IDS].cpu().numpy()
    mask = prompts.batch[fields.ATTENTION_MASK].cpu().numpy().astype(bool)
    found: dict[bytes, list[int]] = {}
    tokens: dict[bytes, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
    for row in range(len(ids)):
        own = np.ascontiguousarray(ids[row][mask[row]])
        key = own.tobytes()
        tokens.setdefault(key, own)
        found.setdefault(key, []).append(row)
    return [SamePrompt(tuple(rows), PrefixHashes(tokens[key])) for key, rows in found.items()]


class Work:
    """The rows of one call of `ReplicatedRollout.generate_sequences`.

    Args:
        prompts: the batch of the call.
    """

    def __init__(self, prompts: DataProto) -> None:
        self._prompts = prompts
        self._waiting = deque(same_prompts(prompts))
        self._asked: set[Request] = set()
        self._answers: list[tuple[list[int], DataProto]] = []

    @property
    def is_done(self) -> bool:
        """Whether every row is answered."""
        return not self._waiting and not self._asked

    @property
    def waiting(self) -> Sequence[SamePrompt]:
        """The prompts of which no replica is asked now, in the order in which they are due."""
        return self._waiting

    def ask(self, rows: int, wanted: Callable[[SamePrompt], bool]) -> Request | None:
        """Take waiting prompts that are `wanted` for one request, until it has `rows` rows.

        The rows of a prompt are not divided, so a request can have more. None: nothing is wanted.
        """
        taken: list[SamePrompt] = []
        left: deque[SamePrompt] = deque()
        count = 0
        for member in self._waiting:
            fits = not taken or count + len(member.rows) <= rows
            if fits and count < rows and wanted(member):
                taken.append(member)
                count += len(member.rows)
            else:
                left.append(member)
        if not taken:
            return None
        self._waiting = left
        request = Request(tuple(taken))
        self._asked.add(request)
        return request

    def batch_of(self, request: Request) -> DataProto:
        """Return the rows of a request as a batch for a replica."""
        return self._prompts.select_idxs(np.array(request.rows))

    def answer(self, request: Request, rows: DataProto) -> None:
        """Keep the answer to a request that was asked.

        Raises:
            RolloutOutputError: it has another number of rows. The rows stay asked.
        """
        assert request in self._asked, "a request is answered once"
        expected = len(request.rows)
        if len(rows) != expected:
            raise RolloutOutputError(
                f"a replica was asked for {expected} responses and returned {len(rows)}",
                fault="missing row",
                row=None,
            )
        self._asked.remove(request)
        self._answers.append((request.rows, rows))

    def give_back(self, requests: Iterable[Request]) -> None:
        """Let the rows of requests without an answer wait again, before all others."""
        for request in requests:
            assert request in self._asked, "only a request without an answer is given back"
            self._asked.remove(request)
            self._waiting.extendleft(reversed(request.members))

    def joined(self) -> DataProto:
        """Return the answers of all rows, in the order of the rows of the call."""
        assert self.is_done, "rows without an answer"
        order = np.concatenate([np.array(rows) for rows, _ in self._answers])
        assert len(order) == len(self._prompts) == len(set(order.tolist())), "each row once"
        together = DataProto.concat([rows for _, rows in self._answers])
        return together.select_idxs(np.argsort(order))
