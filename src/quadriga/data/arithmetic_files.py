"""Arithmetic word problems as parquet files, with the columns this field's datasets have."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from quadriga.data.arithmetic import DATA_SOURCE, ArithmeticTask, Problem, make_parts
from quadriga.errors import DataError


@dataclass(frozen=True)
class ArithmeticFiles:
    """Where the parts were written. `sft` holds the demonstrations of the warm start."""

    train: Path
    test: Path
    sft: Path


def write_arithmetic(
    folder: str | Path,
    task: ArithmeticTask | None = None,
    *,
    train_size: int = 4096,
    test_size: int = 256,
    sft_size: int = 512,
    sft_careful: float = 1.0,
    seed: int = 0,
) -> ArithmeticFiles:
    """Write `train.parquet`, `test.parquet` and `sft.parquet` into `folder`.

    Columns: `prompt` (list of {role, content}), `data_source`, `reward_model`
    {style, ground_truth}, `extra_info` {index, split, question, answer (the full reasoning text),
    steps}. The three parts share no problem, and equal arguments write equal rows.

    `sft_careful` is the share of demonstrations that follow the story to its end. The others are
    hasty: they take the result of the first step for the answer. Whoever imitates such teachers
    learns to reckon, but is no more careful than they are; a reward for right answers is what can
    make the difference.

    Raises `DataError` when the task does not hold that many different problems, or `sft_careful` is
    not a share.
    """
    if not 0.0 <= sft_careful <= 1.0:
        raise DataError(f"sft_careful is a share of the demonstrations, 0 to 1, got {sft_careful}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"test": test_size, "sft": sft_size, "train": train_size}
    parts = make_parts(task or ArithmeticTask(), sizes, seed)
    files = ArithmeticFiles(*(folder / f"{name}.parquet" for name in ("train", "test", "sft")))
    for name, path in (("train", files.train), ("test", files.test), ("sft", files.sft)):
        share = sft_careful if name == "sft" else 1.0
        rng = random.Random(f"{seed}/{name}/careful")
        rows = [
            problem_row(problem, index, name, careful=rng.random() < share)
            for index, problem in enumerate(parts[name])
        ]
        pq.write_table(pa.Table.from_pylist(rows), path)
    return files


def problem_row(
    problem: Problem, index: int, split: str, *, careful: bool = True
) -> dict[str, Any]:
    """One row of a data file; without `careful` its answer stops after the first step."""
    answer = problem.solution if careful else hasty_solution(problem)
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


def hasty_solution(problem: Problem) -> str:
    """The first step, and its result for an answer."""
    first = problem.solution.split("\n", 1)[0]
    return f"{first}\n#### {first.split('=')[1]}"
