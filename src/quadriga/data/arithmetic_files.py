"""Write arithmetic word problems to parquet files, with the columns of verl's datasets."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from quadriga.data.arithmetic import DATA_SOURCE, ArithmeticTask, Problem, make_parts
from quadriga.errors import DataError

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
