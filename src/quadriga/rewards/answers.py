"""Finding the answer in a solution that ends as GSM8K's do: reasoning, then `#### answer`."""

from __future__ import annotations

import re
from typing import Any

_MARKED = re.compile(r"####\s*(-?[\d.,]*\d)")


def marked_answer(solution: str) -> str | None:
    """The number after the last `####` with a number, without thousands commas; None if none."""
    found = _MARKED.findall(solution)
    return found[-1].replace(",", "") if found else None


def same_number(left: str, right: str) -> bool:
    """Whether two texts are the same number (`5`, `5.0` and `05` are); else the same text."""
    try:
        return float(left.replace(",", "")) == float(right.replace(",", ""))
    except ValueError:
        return left.strip() == right.strip()


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
) -> float:
    """1.0 where the number after the last `####` is `ground_truth`, else 0.0.

    GSM8K's own rule (arXiv 2110.14168), strict about form: an answer without the mark is wrong.
    """
    del data_source, extra_info
    answer = marked_answer(solution_str)
    return float(answer is not None and same_number(answer, str(ground_truth)))
