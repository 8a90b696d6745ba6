"""The built-in rule: compare the number after `####` with the ground truth, as in GSM8K."""

from __future__ import annotations

import re
from collections.abc import Mapping

# "-12", "1,234", "0.5"; the last character is a digit, so a full stop after the number is left out.
_MARKED = re.compile(r"####\s*(-?[\d.,]*\d)")


def marked_answer(solution: str) -> str | None:
    """Return the number after the last `####`, without thousands separators; None if there is none.

    "3+4=7\\n#### 7" → "7"; "#### 1,234" → "1234"; "#### seven" → None.
    """
    found = _MARKED.findall(solution)
    return found[-1].replace(",", "") if found else None


def same_number(left: str, right: str) -> bool:
    """Return whether two texts are equal as numbers ("5", "5.0", "05"), or else equal as texts."""
    try:
        return float(left.replace(",", "")) == float(right.replace(",", ""))
    except ValueError:
        return left.strip() == right.strip()


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping[str, object] | None = None,
) -> float:
    """Return 1.0 if the number after the last `####` equals `ground_truth`, else 0.0.

    This is the rule of GSM8K (arXiv 2110.14168). It requires the form: a correct number without
    `####` scores 0.
    """
    del data_source, extra_info
    answer = marked_answer(solution_str)
    return float(answer is not None and same_number(answer, str(ground_truth)))
