"""The built-in rule for multiple choice: compare the letter that a response states last.

A policy learns to state its answer as the rule reads it, so the forms are few, and a response that
states none scores 0: `\\boxed{B}`, `#### B`, `<answer>B</answer>`, `Answer: B`, "the answer is
(B)", and a letter alone.
"""

import re
from collections.abc import Mapping

from quadriga.rewards.functions import after_thoughts

# Formatting that says nothing about the answer.
_SIGNS = re.compile(r"\\(?:text|textbf|mathrm|mathbf) ?(?=\{)|\\[\[\]()]|[*`$\"“”{}]")
_STATED = re.compile(
    r"(?:\b(?i:boxed|(?:answer|choice|option|letter)(?:(?:\s+(?:is|would be|must be)|:)+|(?=\n)))"
    r"|<(?i:answer)>|####)\s*(?i:(?:clearly|therefore)\s)?(?i:(?:option|choice|letter)\s+)?"
    # Not the article of "A dog", and neither the initials of a name nor B = 3.
    r"(?:[(\[]([A-J])[)\]]|([A-J])(?=\s*(?:$|\n|<|[):]|\.(?!\w|\ [A-Z]\.))))"
    r"(?!\s*(?:[,/&?]|or\b|and\b|(?:which |that )?is (?:not|wrong|incorrect)\b))"
)
_ALONE = re.compile(r"\W*(?i:option |choice )?([A-J])\W*")


def chosen_letter(solution: str) -> str | None:
    """Return the letter of the answer, A to J; None if the response states none.

    So \\boxed{B}.                              B
    The answer is (A). No, the answer is (B).  B
    <think>Answer: A</think> C                 C
    The answer is A or B.                      None
    Answer: A dog                              None
    A) 3 B) 4 C) 5                             None
    """
    # A brace ends a box: `\\boxed{B} holds`.
    text = _SIGNS.sub(lambda sign: "\n" * (sign[0] == "}"), after_thoughts(solution))
    stated = [*_STATED.finditer(text)]
    found = stated[-1] if stated else _ALONE.fullmatch(text)
    return found[found.lastindex or 0] if found else None


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
        wanted = "a letter from A to J or a number from 0 to 9"
        raise ValueError(f"the ground truth must be {wanted}, got {truth!r:.100}")
    return text
