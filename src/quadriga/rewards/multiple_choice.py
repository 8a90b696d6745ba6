"""The built-in rule for multiple choice: compare the letter of the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping

# The text has no stars and no two spaces in a row, so no part of a form repeats, and matching takes
# time proportional to the length of the text.
_END = r"(?=[).,:;!?\]]|$)"
_OPEN = r"(?:[(\[](?=[A-J][)\]]))?"
# B or (B), but not the B of Banana, and neither the pronoun I nor, after a colon, the article A.
_SAID = rf"{_OPEN}([A-HJ](?![\w'’])|I{_END})"
_GIVEN = rf"{_OPEN}([B-HJ](?![\w'’])|[AI]{_END})"
_FORMS = (
    re.compile(r"\\boxed ?\{ ?(?:\\(?:text|mathrm|textbf|mathbf) ?\{)? ?\(?([A-J])\)? ?\}"),
    re.compile(rf"(?i:\banswer) ?(?:(?i:is)(?: ?: ?| ){_SAID}|: ?{_GIVEN})"),
    re.compile(rf"#### ?{_GIVEN}"),
    re.compile(
        rf"(?i:\bcorrect (?:option|choice|letter)) ?(?:(?i:is)(?: ?: ?| ){_SAID}|: ?{_GIVEN})"
    ),
    re.compile(rf"^{_OPEN}([A-J])(?:[.):\]]|$)"),
)
"""Forms of an answer, the most definite one first."""


def chosen_letter(solution: str) -> str | None:
    """Return the letter of the answer, A to J; None if there is none.

    The first form that occurs decides, and of several occurrences the last one:

        So \\boxed{B}.                    B
        The answer is (C), not D.         C
        Answer: A … Final answer: **D**   D
        B) because the sum is even        B
        My answer is D: I am sure         D
        Answer: A dog                     None, since A can be the article
        A banana is yellow.               None
    """
    text = " ".join(solution.replace("*", "").split())
    for form in _FORMS:
        found = [match[match.lastindex or 0] for match in form.finditer(text)]
        if found:
            return found[-1]
    return None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping[str, object] | None = None,
) -> dict[str, float | str | None]:
    """Return the score, 1.0 if the response chooses `ground_truth` and else 0.0, and the letter.

    Args:
        ground_truth: a letter, or the number of the choice from 0.

    Raises:
        ValueError: the ground truth is neither.
    """
    del data_source, extra_info
    answer = chosen_letter(solution_str)
    return {"score": float(answer == _letter(ground_truth)), "answer": answer}


def _letter(truth: object) -> str:
    if isinstance(truth, int) and 0 <= truth < 10:
        return "ABCDEFGHIJ"[truth]
    text = str(truth).strip().strip("().").upper()
    if len(text) != 1 or not "A" <= text <= "J":
        raise ValueError(
            f"the ground truth must be a letter from A to J or a number from 0 to 9, "
            f"got {truth!r:.100}"
        )
    return text
