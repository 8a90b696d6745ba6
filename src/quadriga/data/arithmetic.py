"""Generate arithmetic word problems in the form of GSM8K from a seed.

A problem is a story with a first number, `min_steps` to `max_steps` events, and a question:

    Tom has 3 apples. He buys 4 more. He gives 2 to Ann. How many apples does Tom have now?

The solution has one line per step and then the answer after `####`, as in GSM8K (arXiv 2110.14168):

    3+4=7
    7-2=5
    #### 5

Two problems are equal if their wordings and numbers are equal, even if the people and the things
differ. The splits that `make_parts` returns share no problem in this strict sense, so a model
cannot solve a validation problem by recalling a training problem.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

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
_MAX_REPEATS = 5000  # consecutive draws without a new problem after which a task is exhausted

# (kind and wording of a sentence, its numbers): ("=0", 3, 0) is "{who} has 3 {things}."
Key: TypeAlias = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class ArithmeticTask:
    """The distribution of problems. Raises `DataError` for settings that allow no problem.

    Attributes:
        max_number: each number in a story is between 1 and `max_number`.
        min_steps, max_steps: the number of calculations of a problem.
        max_total: intermediate results are between 0 and `max_total`; None: no upper bound.
        phrasings: how many wordings of each kind of sentence are used.
        operations: "+" and "-" are events. "*" is a first sentence ("4 bags with 3 apples in
            each"), which counts as a step.
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
                f"max_total must be at least max_number={self.max_number}, with which a story may "
                f"start, got {self.max_total}"
            )
        if not 1 <= self.phrasings <= len(STARTS):
            raise DataError(f"phrasings must be between 1 and {len(STARTS)}, got {self.phrasings}")
        if not set(self.operations) <= set(OPERATIONS) or "+" not in self.operations:
            raise DataError(
                f"operations must be a subset of {OPERATIONS} with '+', got {self.operations}"
            )
        if self.max_total is not None and "-" not in self.operations:
            raise DataError(
                "max_total needs '-' among the operations: without it a story that has reached "
                "max_total could not continue"
            )


@dataclass(frozen=True)
class Problem:
    """One problem. Problems with equal `key` are the same: wordings and numbers, without names."""

    question: str
    solution: str
    answer: int
    steps: int
    key: Key


def make_problem(task: ArithmeticTask, rng: random.Random) -> Problem:
    """Generate one problem from the random numbers of `rng`."""
    steps = rng.randint(task.min_steps, task.max_steps)
    story = _Story(task, rng)
    story.add_start()
    while len(story.lines) < steps:
        story.add_event()
    story.add_question()
    return Problem(
        question=" ".join(story.sentences),
        solution="\n".join([*story.lines, f"#### {story.total}"]),
        answer=story.total,
        steps=steps,
        key=tuple(story.key),
    )


class _Story:
    """A story under construction: its sentences, the steps of its solution, the current total."""

    def __init__(self, task: ArithmeticTask, rng: random.Random) -> None:
        (who, they), (other, _) = rng.sample(PEOPLE, 2)
        self.words = {"who": who, "they": they, "other": other, "things": rng.choice(THINGS)}
        self.task = task
        self.rng = rng
        self.total = 0
        self.sentences: list[str] = []
        self.lines: list[str] = []
        self.key: list[tuple[str, int, int]] = []

    def add_start(self) -> None:
        """Add the first sentence. A product is also the first step of the solution."""
        n = self.rng.randint(1, self.task.max_number)
        if "*" in self.task.operations and self.rng.random() < 1 / len(self.task.operations):
            # n × m must not exceed max_total: with n = 4 and max_total = 30, m ≤ 30 // 4 = 7.
            m = self.rng.randint(1, min(self.task.max_number, max(1, self._remaining() // n)))
            self._add_sentence("*", MULTIPLES, n, m)
            self._add_step(f"{n}*{m}", n * m)
        else:
            self._add_sentence("=", STARTS, n)
            self.total = n

    def add_event(self) -> None:
        """Add a gain or a loss that keeps the total between 0 and `max_total`."""
        sign = self._sign()
        largest = self.total if sign == "-" else self._remaining()
        n = self.rng.randint(1, min(self.task.max_number, largest))
        self._add_sentence(sign, GAINS if sign == "+" else LOSSES, n)
        result = self.total + n if sign == "+" else self.total - n
        self._add_step(f"{self.total}{sign}{n}", result)

    def add_question(self) -> None:
        """Add the question."""
        self._add_sentence("?", QUESTIONS)

    def _add_sentence(self, kind: str, wordings: tuple[str, ...], n: int = 0, m: int = 0) -> None:
        # The key names the wording by its number and omits people and things.
        which = self.rng.randrange(self.task.phrasings)
        self.sentences.append(wordings[which].format(n=n, m=m, **self.words))
        self.key.append((f"{kind}{which}", n, m))

    def _add_step(self, term: str, result: int) -> None:
        self.lines.append(f"{term}={result}")
        self.total = result

    def _remaining(self) -> int:
        """Return the largest number that may be added to the total."""
        if self.task.max_total is None:
            return self.task.max_number**2  # the largest product, so it bounds nothing
        return self.task.max_total - self.total

    def _sign(self) -> str:
        # "-" is impossible at a total of 0, and "+" at a total of `max_total`.
        if self.total == 0 or "-" not in self.task.operations:
            return "+"
        return "-" if self._remaining() == 0 else self.rng.choice("+-")


def make_parts(
    task: ArithmeticTask, sizes: Mapping[str, int], seed: int
) -> dict[str, list[Problem]]:
    """Return one list of problems per split (name → size). All problems are different.

    Equal arguments give equal problems. A split does not depend on the sizes of the splits after
    it: with {"test": 50, "train": n} the test problems are the same for every n.

    Raises `DataError` if the task does not have that many different problems.
    """
    seen: set[Key] = set()
    parts: dict[str, list[Problem]] = {}
    for name, size in sizes.items():
        if size < 1:
            raise DataError(f"split {name!r} must have at least 1 problem, got {size}")
        # One stream of random numbers per split: with a common one, a larger split would change
        # the problems of all later splits. `Random` hashes a text the same way in every process.
        rng = random.Random(f"{seed}/{name}")
        parts[name] = list(_new_problems(task, size, rng, seen, name))
    return parts


def _new_problems(
    task: ArithmeticTask, size: int, rng: random.Random, seen: set[Key], name: str
) -> Iterable[Problem]:
    """Yield `size` problems that are not in `seen`, and add them to it."""
    made = repeats = 0
    while made < size:
        problem = make_problem(task, rng)
        if problem.key not in seen:
            seen.add(problem.key)
            made += 1
            repeats = 0
            yield problem
            continue
        repeats += 1
        if repeats > _MAX_REPEATS:
            raise DataError(
                f"split {name!r} needs {size} problems, but only {made} were found that are in no "
                f"other split ({len(seen)} in all splits); increase max_number, max_steps or "
                "phrasings, or reduce the sizes"
            )


_TERM = re.compile(r"([-+*])")
Step: TypeAlias = tuple[str, int]  # "7-2=5" is ("-", 2)


@dataclass(frozen=True)
class ArithmeticFiles:
    """The paths of the written files. `sft` holds the demonstrations for fine-tuning, `rm` pairs of
    a right and a wrong solution, `rm_test` such pairs of the problems of `test`."""

    train: Path
    test: Path
    sft: Path
    rm: Path | None = None
    rm_test: Path | None = None


def write_arithmetic(
    folder: str | Path,
    task: ArithmeticTask | None = None,
    *,
    train_size: int = 4096,
    test_size: int = 256,
    sft_size: int = 512,
    rm_size: int = 0,
    sft_careful: float = 1.0,
    seed: int = 0,
) -> ArithmeticFiles:
    """Write `train.parquet`, `test.parquet` and `sft.parquet` into `folder`.

    Columns: `prompt` (list of {role, content}), `data_source`, `reward_model`
    {style, ground_truth}, `extra_info` {index, split, question, answer (solution with all steps),
    steps}. The three files share no problem, and equal arguments write equal rows.

    `sft_careful` is the share of demonstrations with all steps. The other demonstrations stop after
    the first step and give its result as the answer. A model that is fine-tuned on them learns to
    calculate, but stops too early as often as they do. This leaves something to learn for
    reinforcement learning, whose reward depends on the answer alone.

    With `rm_size` there are also `rm.parquet` and `rm_test.parquet`, whose columns `chosen` and
    `rejected` are a right and a wrong solution. The problems of `rm_test.parquet` are those of
    `test.parquet`.

    Raises `DataError` if the task does not have that many different problems, or if `sft_careful`
    is not between 0 and 1.
    """
    if not 0.0 <= sft_careful <= 1.0:
        raise DataError(
            f"sft_careful must be a share of the demonstrations between 0 and 1, got {sft_careful}"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # "train" is last: the other files do not depend on its size.
    sizes = {"test": test_size, "sft": sft_size}
    sizes |= {"rm": rm_size} if rm_size else {}
    sizes["train"] = train_size
    parts = make_parts(task or ArithmeticTask(), sizes, seed)
    train, test, sft, rm = (folder / f"{name}.parquet" for name in ("train", "test", "sft", "rm"))
    files = ArithmeticFiles(train, test, sft)
    if rm_size:
        files = replace(files, rm=rm, rm_test=folder / "rm_test.parquet")
    for name, pairs_of in (("rm", files.rm), ("test", files.rm_test)):
        if pairs_of is not None:
            rng = random.Random(f"{seed}/{name}/wrong")
            pairs = [pair_row(problem, index, rng) for index, problem in enumerate(parts[name])]
            pq.write_table(pa.Table.from_pylist(pairs), pairs_of)
    for name, path in (("train", files.train), ("test", files.test), ("sft", files.sft)):
        share = sft_careful if name == "sft" else 1.0
        # A stream of its own, so that `sft_careful` changes solutions but never the problems.
        rng = random.Random(f"{seed}/{name}/careful")
        rows = [
            problem_row(problem, index, name, careful=rng.random() < share)
            for index, problem in enumerate(parts[name])
        ]
        pq.write_table(pa.Table.from_pylist(rows), path)
    return files


def problem_row(
    problem: Problem, index: int, split: str, *, careful: bool = True
) -> dict[str, object]:
    """Return one row of a data file; without `careful` its answer stops after the first step."""
    answer = problem.solution if careful else first_step_solution(problem)
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.question}],
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {
            "index": index,
            "split": split,
            "question": problem.question,
            "answer": answer,
            "steps": problem.steps,
        },
    }


def pair_row(problem: Problem, index: int, rng: random.Random) -> dict[str, object]:
    """Return one row of a file of pairs."""
    row = problem_row(problem, index, "rm")
    return {**row, "chosen": problem.solution, "rejected": wrong_solution(problem, rng)}


def wrong_solution(problem: Problem, rng: random.Random) -> str:
    """Return a solution with one mistake, of one of four kinds, and another answer.

    The kinds for "3+4=7\\n7-2=5\\n#### 5". Each is drawn equally often, and a draw that gives no
    wrong answer is repeated, so those that apply to few problems are rarer:

        3+4=7 #### 7                  it stops early
        3+4=7 7-2=5 5+2=7 #### 7      it has a step too many
        3+5=8 8-2=6 #### 6            a number of a step is another one
        3+4=7 7-2=6 #### 6            the last result is wrong by 1 or 2
    """
    while True:
        steps, slip = _steps(problem), 0
        kind = rng.choice(("early", "extra", "number", "result"))
        place = rng.randrange(len(steps))
        if kind == "early":
            steps = steps[: place + 1]
        elif kind == "extra":
            steps.append((rng.choice("+-"), rng.choice(steps)[1]))
        elif kind == "number":
            steps[place] = (steps[place][0], rng.randint(1, max(n for _, n in steps) + 1))
        else:
            slip = rng.choice((-2, -1, 1, 2))
        totals = _totals(problem, steps)
        totals[-1] += slip
        if min(totals) >= 0 and totals[-1] != problem.answer:
            return _written(steps, totals)


def _steps(problem: Problem) -> list[Step]:
    """Return the steps of the solution."""
    terms = [line.split("=")[0] for line in problem.solution.split("\n")[:-1]]
    return [(sign, int(number)) for _, sign, number in map(_TERM.split, terms)]


def _totals(problem: Problem, steps: list[Step]) -> list[int]:
    """Return the first number of the solution and the result of each step."""
    totals = [int(_TERM.split(problem.solution, maxsplit=1)[0])]
    for sign, number in steps:
        total = totals[-1]
        results = {"+": total + number, "-": total - number, "*": total * number}
        totals.append(results[sign])
    return totals


def _written(steps: list[Step], totals: list[int]) -> str:
    """Return a solution of these steps: one line for each, and the last total as the answer."""
    lines = [
        f"{total}{sign}{number}={result}"
        for (sign, number), (total, result) in zip(steps, pairwise(totals), strict=True)
    ]
    return "\n".join([*lines, f"#### {totals[-1]}"])


def first_step_solution(problem: Problem) -> str:
    """Return a solution that stops after the first step and gives its result as the answer.

    "3+4=7\\n7-2=5\\n#### 5" → "3+4=7\\n#### 7".
    """
    first = problem.solution.split("\n", 1)[0]
    return f"{first}\n#### {first.split('=')[1]}"
