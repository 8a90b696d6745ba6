"""Arithmetic word problems in the form of GSM8K, made from a seed.

A problem is a story of one start and one to `max_steps` events, and a question:

    Tom has 3 apples. He buys 4 more. He gives 2 to Ann. How many apples does Tom have now?

and its solution is one line a step, then the answer after `####`, as in GSM8K (arXiv 2110.14168):

    3+4=7
    7-2=5
    #### 5

Two problems are *the same* when the story and all its numbers agree, whoever acts in it and
whatever is counted: the parts that `make_parts` returns share no problem in this strict sense.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quadriga.errors import DataError

DATA_SOURCE = "quadriga/arithmetic"

PEOPLE = (
    ("Tom", "He"),
    ("Ann", "She"),
    ("Ben", "He"),
    ("Mia", "She"),
    ("Sam", "He"),
    ("Eva", "She"),
    ("Leo", "He"),
    ("Zoe", "She"),
)
THINGS = ("apples", "books", "coins", "cards", "shells", "pens", "stamps", "stones")

STARTS = (
    "{who} has {n} {things}.",
    "{who} starts the day with {n} {things}.",
    "There are {n} {things} in the bag of {who}.",
)
GAINS = (
    "{they} buys {n} more.",
    "{they} finds {n} {things}.",
    "{other} brings {n} more {things}.",
)
LOSSES = (
    "{they} loses {n}.",
    "{they} gives {n} to {other}.",
    "{other} takes {n} of the {things}.",
)
MULTIPLES = (
    "{who} has {n} bags with {m} {things} in each.",
    "{who} fills {n} boxes with {m} {things} each.",
    "There are {n} rows of {m} {things} before {who}.",
)
QUESTIONS = (
    "How many {things} does {who} have now?",
    "How many {things} are there now?",
    "What is the number of {things} in the end?",
)
OPERATIONS = ("+", "-", "*")
_PATIENCE = 5000  # draws in a row that gave nothing new, before a task counts as exhausted


@dataclass(frozen=True)
class ArithmeticTask:
    """What problems are drawn: every setting of the generator but the seed and the counts.

    `max_number` bounds each number named in a story (they start at 1); running totals are never
    negative and, where `max_total` is given, never above it. `phrasings` is how many wordings of
    each kind of sentence are in use. `*` opens a story (so many bags of so many); the rest goes on.
    """

    max_number: int = 9
    min_steps: int = 1
    max_steps: int = 3
    max_total: int | None = None
    phrasings: int = 3
    operations: tuple[str, ...] = ("+", "-")

    def __post_init__(self) -> None:
        if self.max_number < 1:
            raise DataError(f"max_number must be at least 1, got {self.max_number}")
        if not 1 <= self.min_steps <= self.max_steps:
            raise DataError(
                "steps must satisfy 1 <= min_steps <= max_steps, "
                f"got min_steps={self.min_steps}, max_steps={self.max_steps}"
            )
        if self.max_total is not None and self.max_total < self.max_number:
            raise DataError(
                f"max_total={self.max_total} is below max_number={self.max_number}: a story may "
                "start with max_number things"
            )
        if not 1 <= self.phrasings <= len(STARTS):
            raise DataError(f"phrasings must be 1 to {len(STARTS)}, got {self.phrasings}")
        if not set(self.operations) <= set(OPERATIONS) or "+" not in self.operations:
            raise DataError(
                f"operations must be some of {OPERATIONS}, '+' among them, got {self.operations}"
            )
        if self.max_total is not None and "-" not in self.operations:
            raise DataError("max_total needs '-' among the operations, else a story cannot go on")


@dataclass(frozen=True)
class Problem:
    """One problem. `key` is its identity: story and numbers, without people and things."""

    question: str
    solution: str
    answer: int
    steps: int
    key: tuple[tuple[str, int, int], ...]


def make_problem(task: ArithmeticTask, rng: random.Random) -> Problem:
    """Draw one problem; everything random about it comes from `rng`."""
    steps = rng.randint(task.min_steps, task.max_steps)
    story = _Story(task, rng)
    story.open()
    while len(story.lines) < steps:
        story.go_on()
    story.ask()
    return Problem(
        question=" ".join(story.sentences),
        solution="\n".join([*story.lines, f"#### {story.total}"]),
        answer=story.total,
        steps=steps,
        key=tuple(story.key),
    )


class _Story:
    """A story while it is told: its sentences, its solution's lines and the running total."""

    def __init__(self, task: ArithmeticTask, rng: random.Random) -> None:
        (who, they), (other, _) = rng.sample(PEOPLE, 2)
        self.words = {"who": who, "they": they, "other": other, "things": rng.choice(THINGS)}
        self.task = task
        self.rng = rng
        self.total = 0
        self.sentences: list[str] = []
        self.lines: list[str] = []
        self.key: list[tuple[str, int, int]] = []

    def open(self) -> None:
        n = self.rng.randint(1, self.task.max_number)
        if "*" in self.task.operations and self.rng.random() < 1 / len(self.task.operations):
            m = self.rng.randint(1, min(self.task.max_number, max(1, self._room() // n)))
            self._say("*", MULTIPLES, n, m)
            self._reckon(f"{n}*{m}", n * m)
        else:
            self._say("=", STARTS, n)
            self.total = n

    def go_on(self) -> None:
        sign = self._sign()
        room = self.total if sign == "-" else self._room()
        n = self.rng.randint(1, min(self.task.max_number, room))
        self._say(sign, GAINS if sign == "+" else LOSSES, n)
        self._reckon(f"{self.total}{sign}{n}", self.total + n if sign == "+" else self.total - n)

    def ask(self) -> None:
        self._say("?", QUESTIONS)

    def _say(self, kind: str, wordings: tuple[str, ...], n: int = 0, m: int = 0) -> None:
        which = self.rng.randrange(self.task.phrasings)
        self.sentences.append(wordings[which].format(n=n, m=m, **self.words))
        self.key.append((f"{kind}{which}", n, m))

    def _reckon(self, term: str, result: int) -> None:
        self.lines.append(f"{term}={result}")
        self.total = result

    def _room(self) -> int:
        if self.task.max_total is None:
            return self.task.max_number**2
        return self.task.max_total - self.total

    def _sign(self) -> str:
        if self.total == 0 or "-" not in self.task.operations:
            return "+"
        return "-" if self._room() == 0 else self.rng.choice("+-")


def make_parts(
    task: ArithmeticTask, sizes: Mapping[str, int], seed: int
) -> dict[str, list[Problem]]:
    """Draw one list of problems a part, in the order given; no problem is in two parts.

    Within a part each problem occurs once. Equal arguments give equal parts, and a part does not
    depend on the sizes of those after it.

    Raises `DataError` when the task does not hold that many different problems.
    """
    seen: set[tuple[tuple[str, int, int], ...]] = set()
    parts: dict[str, list[Problem]] = {}
    for name, size in sizes.items():
        if size < 1:
            raise DataError(f"part {name!r} must hold at least 1 problem, got {size}")
        rng = random.Random(f"{seed}/{name}")
        parts[name] = list(_fresh(task, size, rng, seen, name))
    return parts


def _fresh(
    task: ArithmeticTask,
    size: int,
    rng: random.Random,
    seen: set[tuple[tuple[str, int, int], ...]],
    name: str,
) -> Iterable[Problem]:
    made = in_vain = 0
    while made < size:
        problem = make_problem(task, rng)
        if problem.key not in seen:
            seen.add(problem.key)
            made += 1
            in_vain = 0
            yield problem
            continue
        in_vain += 1
        if in_vain > _PATIENCE:
            raise DataError(
                f"part {name!r} wants {size} problems, but only {made} different ones were found "
                f"that no other part has ({len(seen)} in all); raise max_number, max_steps or "
                "phrasings, or ask for fewer"
            )
