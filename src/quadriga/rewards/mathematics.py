"""The built-in rule for mathematics: compare answers as expressions, with the package math-verify.

It parses LaTeX and plain expressions, so that 0.5, 1/2 and \\frac{1}{2} are equal. A response's
answer is what it has in the last \\boxed{…}, else its last expression. Simplifying one can
take any time, so the rule runs in the processes of the reward pool, which have a deadline.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from importlib.util import find_spec

from quadriga.errors import ConfigError

if find_spec("math_verify") is None:
    raise ConfigError(
        "rewards for mathematics need the package math-verify; install it with "
        "pip install 'quadriga[math]', or set reward.path to a rule of your own",
        key="reward.path",
    )

# Not within the function: the import takes a second, which would count against the deadline of the
# first sample of a process.
from math_verify import parse, verify

# The package warns in each call that its own deadline is off. Its deadline is a signal, which only
# the main thread can receive.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_BOX = re.compile(r"\\boxed ?\{")
_LISTED = re.compile(r"[\s$,;]*(?:and|or|\\text\{ ?(?:and|or) ?\})?[\s$,;]*")
"""What is between boxes that are one answer."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping[str, object] | None = None,
) -> dict[str, float | str | None]:
    """Return the score, 1.0 if the answer equals `ground_truth` and else 0.0, and the answer.

    Raises:
        ValueError: the ground truth is no expression.
    """
    del data_source, extra_info
    truth = parse(_marked(str(ground_truth)), parsing_timeout=None)
    if not truth:
        raise ValueError(f"the ground truth {ground_truth!r:.100} is no expression")
    found = parse(_last_boxes(solution_str), parsing_timeout=None)
    if not found:
        return {"score": 0.0, "answer": None}
    equal = verify(truth, found, timeout_seconds=None)
    return {"score": float(equal), "answer": str(found[0])}


def _marked(truth: str) -> str:
    """Return a ground truth as LaTeX: the parser reads `\\frac{1}{2}` only between dollar signs.

    An amount of dollars, `\\$18.90`, is a number.
    """
    amount = truth.replace("\\$", "")
    return amount if "$" in amount or "\\boxed" in amount else f"${amount}$"


def _last_boxes(solution: str) -> str:
    """Return the last box with those that are listed before it, or the text if it has no box.

    first \\boxed{3}, so \\boxed{4}.          $\\boxed{4}$
    $\\boxed{1}$ and $\\boxed{2}$             $\\boxed{1}$ and $\\boxed{2}$
    """
    boxes: list[str] = []
    start = len(solution)
    for found in reversed(list(_BOX.finditer(solution))):
        end = _closing(solution, found.end())
        if boxes and (end > start or not _LISTED.fullmatch(solution[end:start])):
            break
        start = found.start()
        boxes.append(f"${solution[start:end]}$")
    return " and ".join(reversed(boxes)) or solution


def _closing(text: str, start: int) -> int:
    """Return the position after the brace that closes the one before `start`."""
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if not depth:
            return position + 1
    return len(text)
