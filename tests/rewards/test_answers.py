"""The built-in rule for answers after `####`."""

import pytest

from quadriga.rewards.functions import marked_answer


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
