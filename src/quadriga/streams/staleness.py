"""Which prompt groups a step may train, so that none becomes older than the bound."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# `groups` = 2 prompt groups a step, `steps` = 1. Four groups start before step 1, and A C D are the
# first to be complete:
#
#   step   on the way, with the steps that had ended at the start   complete   trained
#   1      A0 B0 C0 D0                                              A C D      A C
#   2      B0 D0 E1 F1                                              B D E      B D: both must be
#   3      E1 F1 G2 H2                                              E G H      waits for F
#
# Before step 2 one step has ended. B and D have started before it, so they are of age 1, the oldest
# that may be trained: step 2 cannot take E in the place of B. The groups that may be left over are
# so few that later steps can train each in time.


@dataclass(frozen=True)
class StalenessBound:
    """How old the responses of a step may be.

    The age of a prompt group is the number of training steps that have ended between the start of
    its generation and the step that trains it. Its weights are older by at most as many versions,
    because a step has at most one weight sync.

    Attributes:
        groups: prompt groups that a step trains.
        steps: the largest age (`trainer.max_staleness`).
    """

    groups: int
    steps: int

    @property
    def most(self) -> int:
        """How many groups may be on their way before a step takes its own. Then no group can become
        too old, whatever the order in which they end (AReaL, arXiv 2505.24298)."""
        return self.groups * (self.steps + 1)

    def choose(
        self, ended: int, started: Mapping[int, int], complete: Sequence[int]
    ) -> list[int] | None:
        """Return the groups of the next step, in the order of their numbers; None: wait.

        The groups that were complete first are taken, unless an older one must be.

        Args:
            ended: training steps that have ended.
            started: number of each group on its way → the steps that had ended at its start.
            complete: numbers of the groups that can be trained, the first to be complete first.
        """
        chosen: list[int] = []
        for age in range(self.steps, -1, -1):
            # `steps - age` later steps can train groups of this age or older.
            old = {number for number, at in started.items() if at <= ended - age}
            must = len(old) - self.groups * (self.steps - age) - len(old.intersection(chosen))
            able = [number for number in complete if number in old and number not in chosen]
            if must > len(able):
                return None
            chosen += able[: max(must, 0)]
        chosen += [number for number in complete if number not in chosen][
            : self.groups - len(chosen)
        ]
        return sorted(chosen) if len(chosen) == self.groups else None
