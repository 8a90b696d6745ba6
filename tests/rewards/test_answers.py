"""The built-in rule for answers after `####`."""

import pytest

from quadriga.rewards.answers import compute_score, marked_answer, same_number


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("3+4=7\n#### 7", "7"),
        ("#### 7\nno, #### 8", "8"),
        ("####7", "7"),
        ("#### -12", "-12"),
        ("#### 1,234", "1234"),
        ("#### 0.5.", "0.5"),
        ("the answer is 7", None),
        ("####", None),
        ("#### seven", None),
        ("", None),
    ],
)
def test_the_answer_is_the_last_number_after_a_mark(solution, answer):
    assert marked_answer(solution) == answer


def test_equal_numbers_may_be_written_differently():
    assert same_number("5", "5.0")
    assert same_number("1,000", "1000")
    assert not same_number("5", "50")
    assert same_number("a", " a ")
    assert not same_number("5", "a")


@pytest.mark.parametrize(
    ("solution", "score"), [("#### 12", 1.0), ("#### 1", 0.0), ("12", 0.0), ("#### 12 3", 1.0)]
)
def test_only_the_correct_number_after_the_mark_scores_one(solution, score):
    assert compute_score("openai/gsm8k", solution, "12", {}) == score
