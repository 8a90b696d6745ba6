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

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from quadriga.config.paths import local_path
from quadriga.errors import DataError

DATA_SOURCE = "quadriga/arithmetic"

NAMES = ("Tom", "Ann", "Ben", "Mia", "Sam", "Eva", "Leo", "Zoe")
PEOPLE = tuple(zip(NAMES, ("He", "She") * 4, strict=True))
THINGS = ("apples", "books", "coins", "cards", "shells", "pens", "stamps", "stones")

WORDINGS = {
    "=": (
        "{who} has {n} {things}.",
        "{who} starts the day with {n} {things}.",
        "There are {n} {things} in the bag of {who}.",
    ),
    "+": (
        "{they} buys {n} more.",
        "{they} finds {n} {things}.",
        "{other} brings {n} more {things}.",
    ),
    "-": (
        "{they} loses {n}.",
        "{they} gives {n} to {other}.",
        "{other} takes {n} of the {things}.",
    ),
    "?": (
        "How many {things} does {who} have now?",
        "How many {things} are there now?",
        "What is the number of {things} in the end?",
    ),
}
"""Kind of a sentence → its wordings: the start, a gain, a loss, the question."""
_TERM = re.compile(r"([-+])")
_MAX_REPEATS = 5000  # consecutive draws without a new problem after which a task is exhausted

# (kind and wording of a sentence, its number): ("=0", 3) is "{who} has 3 {things}."
Key: TypeAlias = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ArithmeticTask:
    """The distribution of problems. Raises `DataError` for settings that allow no problem.

    Attributes:
        max_number: each number in a story is between 1 and `max_number`.
        min_steps, max_steps: the number of calculations of a problem.
        max_total: intermediate results are between 0 and `max_total`; None: no upper bound.
    """

    max_number: int = 9
    min_steps: int = 1
    max_steps: int = 3
    max_total: int | None = None

    def __post_init__(self) -> None:
        total = self.max_total or self.max_number
        at_least = "max_total must be at least max_number, with which a story may start"
        for fits, rule in (
            (self.max_number >= 1, "max_number must be at least 1"),
            (1 <= self.min_steps <= self.max_steps, "1 <= min_steps <= max_steps must hold"),
            (total >= self.max_number, at_least),
        ):
            if not fits:
                raise DataError(f"{rule}, got {self}")


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
    (who, they), (other, _) = rng.sample(PEOPLE, 2)
    words = {"who": who, "they": they, "other": other, "things": rng.choice(THINGS)}
    sentences: list[str] = []
    key: list[tuple[str, int]] = []
    lines: list[str] = []

    def tell(kind: str, n: int = 0) -> None:
        # The key names the wording by its number and omits people and things.
        which = rng.randrange(len(WORDINGS[kind]))
        sentences.append(WORDINGS[kind][which].format(n=n, **words))
        key.append((f"{kind}{which}", n))

    total = rng.randint(1, task.max_number)
    tell("=", total)
    for _ in range(steps):
        room = task.max_total - total if task.max_total else task.max_number  # what may be added
        sign = rng.choice("+-") if total and room else "-" if total else "+"
        n = rng.randint(1, min(task.max_number, total if sign == "-" else room))
        tell(sign, n)
        result = total + n if sign == "+" else total - n
        lines.append(f"{total}{sign}{n}={result}")
        total = result
    tell("?")
    solution = "\n".join([*lines, f"#### {total}"])
    return Problem(" ".join(sentences), solution, total, steps, tuple(key))


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
        made: list[Problem] = []
        repeats = 0
        while len(made) < size:
            problem = make_problem(task, rng)
            if problem.key not in seen:
                seen.add(problem.key)
                made.append(problem)
                repeats = 0
            elif (repeats := repeats + 1) > _MAX_REPEATS:
                raise DataError(
                    f"split {name!r} needs {size} problems, but only {len(made)} are in no other "
                    f"split ({len(seen)} in all); increase max_number or max_steps, or reduce sizes"
                )
        parts[name] = made
    return parts


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
    folder = Path(local_path(folder))
    folder.mkdir(parents=True, exist_ok=True)
    # "train" is last: the other files do not depend on its size.
    sizes = {"test": test_size, "sft": sft_size, "rm": rm_size, "train": train_size}
    parts = make_parts(
        task or ArithmeticTask(), {k: n for k, n in sizes.items() if n or k != "rm"}, seed
    )
    files: dict[str, list[dict[str, object]]] = {}
    for name in ("train", "test", "sft"):
        share = sft_careful if name == "sft" else 1.0
        # A stream of its own, so that `sft_careful` changes solutions but never the problems.
        rng = random.Random(f"{seed}/{name}/careful")
        files[name] = [
            _row(problem, i, name, _solution(problem, careful=rng.random() < share))
            for i, problem in enumerate(parts[name])
        ]
    for name, file in (("rm", "rm"), ("test", "rm_test")) if rm_size else ():
        rng = random.Random(f"{seed}/{name}/wrong")
        files[file] = [
            _row(problem, index, "rm", problem.solution)
            | {"chosen": problem.solution, "rejected": _wrong_solution(problem, rng)}
            for index, problem in enumerate(parts[name])
        ]
    for name, rows in files.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    return ArithmeticFiles(**{name: folder / f"{name}.parquet" for name in files})


def _row(problem: Problem, index: int, split: str, answer: str) -> dict[str, object]:
    """Return one row of a data file."""
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


def _solution(problem: Problem, *, careful: bool) -> str:
    """Return the solution of a demonstration. Without `careful` it stops after the first step:
    "3+4=7\\n7-2=5\\n#### 5" → "3+4=7\\n#### 7"."""
    first = problem.solution.split("\n", 1)[0]
    return problem.solution if careful else f"{first}\n#### {first.split('=')[1]}"


def _wrong_solution(problem: Problem, rng: random.Random) -> str:
    """Return a solution with one mistake, of one of four kinds, and another answer.

    The kinds for "3+4=7\\n7-2=5\\n#### 5". Each is drawn equally often, and a draw that gives no
    wrong answer is repeated, so those that apply to few problems are rarer:

        3+4=7 #### 7                  it stops early
        3+4=7 7-2=5 5+2=7 #### 7      it has a step too many
        3+5=8 8-2=6 #### 6            a number of a step is another one
        3+4=7 7-2=6 #### 6            the last result is wrong by 1 or 2
    """
    terms = [_TERM.split(line.split("=")[0]) for line in problem.solution.split("\n")[:-1]]
    while True:
        # The sign and the number of each step: "7-2=5" is ("-", 2).
        steps, slip = [(sign, int(number)) for _, sign, number in terms], 0
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
        lines, totals = [], [int(terms[0][0])]
        for number, (sign, n) in enumerate(steps, start=1):
            total = totals[-1]
            result = total + n if sign == "+" else total - n
            totals.append(result + slip * (number == len(steps)))
            lines.append(f"{total}{sign}{n}={totals[-1]}")
        if min(totals) >= 0 and totals[-1] != problem.answer:
            return "\n".join([*lines, f"#### {totals[-1]}"])
