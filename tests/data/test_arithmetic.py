"""Word problems: correct solutions, settings, disjoint splits, reproducible files."""

import random
import re

import pyarrow.parquet as pq
import pytest

from quadriga.data.arithmetic import ArithmeticTask, make_parts, make_problem, write_arithmetic
from quadriga.errors import DataError


def problems(task, count=300):
    rng = random.Random(1)
    return [make_problem(task, rng) for _ in range(count)]


@pytest.mark.parametrize(
    "task",
    [
        ArithmeticTask(),
        ArithmeticTask(max_number=20, max_steps=2),
        ArithmeticTask(max_total=9, max_steps=4, min_steps=2),
        ArithmeticTask(max_number=1, max_total=1),
    ],
)
def test_solutions_are_correct_and_within_the_settings(task):
    for problem in problems(task):
        *lines, last = problem.solution.split("\n")
        assert len(lines) == problem.steps
        assert task.min_steps <= problem.steps <= task.max_steps
        for line, following in zip(lines, [*lines[1:], last], strict=True):
            left, right = line.split("=")
            assert eval(left) == int(right) >= 0
            assert following.startswith((right, "#### "))
            assert task.max_total is None or int(right) <= task.max_total
        assert last == f"#### {problem.answer}" and lines[-1].endswith(f"={problem.answer}")
        named = [int(n) for n in re.findall(r"\d+", problem.question)]
        assert len(named) == problem.steps + 1
        assert all(1 <= n <= task.max_number for n in named)


def test_splits_share_no_problem_even_if_people_and_things_differ():
    parts = make_parts(ArithmeticTask(), {"test": 200, "sft": 300, "train": 500}, seed=3)
    assert [len(part) for part in parts.values()] == [200, 300, 500]
    keys = [problem.key for part in parts.values() for problem in part]
    assert len(set(keys)) == 1000

    def without_names(problem):  # compare the texts, independently of `key`
        text = re.sub(r"apples|books|coins|cards|shells|pens|stamps|stones", "X", problem.question)
        return re.sub(r"Tom|Ann|Ben|Mia|Sam|Eva|Leo|Zoe|He |She ", "N", text)

    test, *rest = ({without_names(problem) for problem in part} for part in parts.values())
    assert not test & set().union(*rest)


def test_a_task_with_too_few_problems_is_an_error():
    with pytest.raises(DataError, match=r"split 'train' needs 100000 problems, but only \d+"):
        make_parts(ArithmeticTask(max_number=2, max_steps=1), {"train": 100000}, 0)


def test_files_have_the_expected_columns_and_equal_seeds_give_equal_rows(tmp_path):
    sizes = {"train_size": 30, "test_size": 10, "sft_size": 20}
    one = write_arithmetic(tmp_path / "one", **sizes, seed=5)
    two = write_arithmetic(tmp_path / "two", **sizes, seed=5)
    for left, right in ((one.train, two.train), (one.test, two.test), (one.sft, two.sft)):
        assert pq.read_table(left) == pq.read_table(right)
    row = pq.read_table(one.train).to_pylist()[3]
    assert set(row) == {"prompt", "data_source", "reward_model", "extra_info"}
    assert row["prompt"] == [{"role": "user", "content": row["extra_info"]["question"]}]
    assert row["reward_model"]["style"] == "rule"
    assert row["extra_info"]["answer"].endswith(f"#### {row['reward_model']['ground_truth']}")
    assert (row["extra_info"]["index"], row["extra_info"]["split"]) == (3, "train")
    assert len(pq.read_table(one.sft)) == 20


def kind_of_mistake(row):
    """Return which of the four mistakes the rejected solution of a pair has."""
    right, wrong = (row[name].split("\n")[:-1] for name in ("chosen", "rejected"))
    if len(right) != len(wrong):
        return "early" if len(wrong) < len(right) else "extra"
    terms, results = zip(*(line.split("=") for line in wrong), strict=True)
    # No other step may have a wrong result, and the next one goes on from it.
    assert all(eval(term) == int(result) for term, result in zip(terms[:-1], results, strict=False))
    following = zip(terms[1:], results, strict=False)
    assert all(re.split("[-+]", term)[0] == result for term, result in following)
    assert row["rejected"].endswith(f"\n#### {results[-1]}")
    return "number" if eval(terms[-1]) == int(results[-1]) else "result"


def test_pairs_have_a_right_and_a_wrong_solution(tmp_path):
    task = ArithmeticTask(max_number=5, max_steps=2)
    sizes = {"train_size": 20, "test_size": 10, "sft_size": 10}
    files = write_arithmetic(tmp_path / "with", task, rm_size=40, **sizes)
    again = write_arithmetic(tmp_path / "again", task, rm_size=40, **sizes)
    rows = pq.read_table(files.rm).to_pylist()
    assert rows == pq.read_table(again.rm).to_pylist()
    assert len(rows) == 40
    for row in rows:
        truth = row["reward_model"]["ground_truth"]
        assert row["chosen"].endswith(f"#### {truth}")
        assert not row["rejected"].endswith(f"#### {truth}")
    assert {kind_of_mistake(row) for row in rows} == {"early", "extra", "number", "result"}
    held_out, test = (pq.read_table(path).to_pylist() for path in (files.rm_test, files.test))
    assert [row["prompt"] for row in held_out] == [row["prompt"] for row in test]
    plain = write_arithmetic(tmp_path / "plain", task, **sizes)
    assert plain.rm is plain.rm_test is None
    assert pq.read_table(plain.sft).equals(pq.read_table(files.sft))
