"""The prompt groups between the data and a training step.

    waiting ──► generating ──► scoring ──► ready ──► trained
       ▲            │             │          │
       └────────────┴─────────────┴──────────┘   its responses are lost with a replica

Every group is in one state, so no prompt is lost and none is trained twice.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from quadriga.agents.environments import Message
from quadriga.protocol import DataProto
from quadriga.streams.replicas import Replica
from quadriga.streams.staleness import StalenessBound
from quadriga.workers.method_fields import CONTINUE_SEQUENCES


@dataclass(eq=False)
class PromptGroup:
    """The rows of one prompt.

    Attributes:
        number: in the order of the data.
        prompts: the rows before their generation.
        started: training steps that had ended when its generation started; None: it waits.
        home: the replica that has its rows, and on which its responses lie; None: none has.
        batch: the rows with their responses, and scores once they are there; None before.
        answers: the rows that have ended, and their responses without scores.
        chats: the prompts of rows before their environments have added to them.
        max_tokens: of the turns of rows whose environments limit them.
    """

    number: int
    prompts: DataProto
    started: int | None = None
    home: Replica | None = None
    batch: DataProto | None = None
    answers: list[tuple[npt.NDArray[np.int64], DataProto]] = field(default_factory=list)
    chats: dict[int, list[Message]] = field(default_factory=dict)
    max_tokens: dict[int, int] = field(default_factory=dict)

    def end(self, rows: npt.NDArray[np.int64], answers: DataProto) -> None:
        """Keep the responses of some rows, which have ended."""
        self.answers.append((rows, answers))
        order = np.concatenate([some for some, _ in self.answers])
        if len(order) < len(self.prompts):
            return
        assert len(set(order.tolist())) == len(self.prompts) == len(order), "each row ends once"
        answered = DataProto.concat([own for _, own in self.answers])
        answered = answered.select_idxs(np.argsort(order))
        replaced = {*CONTINUE_SEQUENCES.drops, *CONTINUE_SEQUENCES.writes}
        kept = [str(key) for key in self.prompts.batch.keys() if key not in replaced]  # noqa: SIM118
        self.batch = self.prompts.select(batch_keys=kept, meta_info_keys=[]).union(answered)

    @property
    def is_lost(self) -> bool:
        """Whether the replica with its responses was lost."""
        return self.home is not None and self.home.loss is not None


class PromptQueue:
    """All prompt groups on their way.

    Args:
        bound: how old a group may become.
        most: groups whose generation has started, at once.
        overlaps: generation goes on while the policy is trained; False: `most` groups may begin.

    The bound allows more groups than most runs need, and a group that waits to be trained grows
    old. So with `overlaps`, the groups that may have begun, `aim`, are one batch at first. They
    become one batch more in each step for which the trainer waits, and fewer if many are ready:
    by a quarter of those that are left over beyond a quarter of a batch. Steps of 8 groups, at most
    40 on their way:

        the step                   waits   waits   finds 2 more   finds 10 more   finds 2 more
        aim, when it takes its own  16      24      24             22              22

    Attributes:
        groups: the prompt groups on their way, by their numbers.
        ended: training steps that have ended.
        taken: training steps that have taken their groups.
        restarted: groups whose generation began again.
        aim: groups that may have begun, at once; from one batch to `most`.
    """

    def __init__(self, bound: StalenessBound, most: int, *, overlaps: bool = False) -> None:
        self.bound, self.most, self._overlaps = bound, most, overlaps
        self.groups: dict[int, PromptGroup] = {}
        self.waiting: deque[PromptGroup] = deque()
        self._ready: list[int] = []  # the first to be complete first
        self.ended = self.taken = self.restarted = 0
        self.aim, self._waits = (bound.groups if overlaps else most), False

    @property
    def complete(self) -> list[PromptGroup]:
        """The groups that can be trained, the first to be complete first."""
        return [self.groups[number] for number in self._ready]

    @property
    def can_start(self) -> bool:
        """Whether a group waits whose generation may start now: a step can train it in time."""
        # Behind `take`, the step that has not ended can train none of the groups that start now.
        in_time = self.bound.most - self.bound.groups * (self.taken - self.ended)
        started = len(self.groups) - len(self.waiting)
        return bool(self.waiting) and started < min(self.most, in_time, self.aim)

    def add(self, groups: Sequence[PromptGroup]) -> None:
        """Add groups. A group of a checkpoint may have begun; the others wait behind those here."""
        self.groups |= {group.number: group for group in groups}
        self.waiting += [group for group in groups if group.started is None]
        self.aim = max(self.aim, len(self.groups) - len(self.waiting))

    def start(self, group: PromptGroup) -> PromptGroup:
        """Take a group that waits; its generation starts now."""
        self.waiting.remove(group)
        group.started = self.ended
        return group

    def ready(self, group: PromptGroup) -> None:
        """A group has its scores, or needs none yet."""
        self._ready.append(group.number)

    def restart(self, groups: Sequence[PromptGroup]) -> None:
        """Let groups wait again, before the others: what they had is lost."""
        for group in sorted(groups, key=lambda group: group.number, reverse=True):
            if group.number in self._ready:
                self._ready.remove(group.number)
            group.batch, group.answers = None, []
            group.started, group.home = None, None
            self.waiting.appendleft(group)
            self.restarted += 1

    def take(self) -> list[PromptGroup] | None:
        """Return the groups of the step, in the order of the data; None: they are not ready, and
        more groups may begin."""
        started = {n: g.started for n, g in self.groups.items() if g.started is not None}
        chosen, batch = self.bound.choose(self.ended, started, self._ready), self.bound.groups
        if chosen is None:
            if not self._waits:
                self._waits, self.aim = True, min(self.most, self.aim + batch)
            return None
        taken, early = self.pop(chosen), len(self._ready) - batch // 4
        if self._overlaps and not self._waits and early > 0:
            self.aim = max(batch, self.aim - math.ceil(early / 4))
        self._waits = False
        return taken

    def pop(self, chosen: Sequence[int]) -> list[PromptGroup]:
        """Return the groups with these numbers for a step."""
        self.taken = self.ended + 1
        return self.remove(chosen)

    def remove(self, numbers: Sequence[int]) -> list[PromptGroup]:
        """Return groups that are on their way no more."""
        self._ready = [number for number in self._ready if number not in numbers]
        return [self.groups.pop(number) for number in numbers]
