"""The built-in rule for mathematics: compare answers as expressions, with the package math-verify.

It parses LaTeX and plain expressions, so that 0.5, 1/2, 50\\% and \\frac{1}{2} are equal. A
response's answer is what it has in the last \\boxed{…}, else its last expression. Simplifying one
can take any time, so the rule runs in the processes of the reward pool, which have a deadline.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, cast

from quadriga.errors import ConfigError
from quadriga.rewards.functions import after_thoughts

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

_BOX = re.compile(r"\\f?box(?:ed)? ?\{")
_LISTED = re.compile(r"[\s$,;]*(?:and|or|\\text\{ ?(?:and|or) ?\})?[\s$,;]*")
"""What is between boxes that are one answer."""

_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?:(?:\\[,; ]|\{,\}| )\d{3})+(?!\d)")
"""A number with groups of three digits: 1\\,000\\,000, 1{,}000, 1 000."""
_SPELLINGS = (
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset "),
    (re.compile(r"\\text\{ ?all real numbers ?\}"), r"\\mathbb{R}"),
    (re.compile(r"\\colon(?![a-zA-Z])"), ":"),
    (re.compile(r"\\\$"), ""),
    (re.compile(r"\\log_\{?e\}?(?![a-zA-Z])"), r"\\ln "),
    (re.compile(r"(\d+(?:\.\d+)?) ?\\?%"), r"\\frac{\1}{100}"),
    (re.compile(r"\\text\{ ?(\\\$|\d+) ?\}"), r"\1"),
    (re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)\b"), r"\1\\times 10^{\2}"),
    (re.compile(r"(\d)\.(?=[\s$}]*$)"), r"\1"),
)
_UNITS = tuple(
    re.compile(rf"\\(?:text|mathrm) ?\{{[\\ ,~]*({units})s?\b")
    for units in (
        "[mcdk]?m|[mk]?g|m?s|min|h|ft|in|yd",
        "second|minute|hour|day|week|year|dollar|cent",
    )
)
_IN_A_BASE = re.compile(r"[0-9A-F]+_\d+")
_UNREAD = re.compile(r"boxed ?\{\s*(?:\\(?:neq?|not)(?![a-z])|≠)|(?:\\[lc]?dots|\.\.\.)\s*\}\$$")
"""Signs in a box that the parser leaves out: unequal to a number, and more digits or terms."""
_NAME = re.compile(r"[A-Z]{2,}|[A-Za-z]")
"""Points of a figure, or one variable: AB is not BA, and x is not X."""
_ROUNDED = 2e-6
"""The relative difference of numbers that are equal, as 0.333333 and 1/3."""
_EXACT = 1e-12
"""The relative difference of one number in two spellings, as 6.02e23 and 602e21."""


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
    truth = _parsed(_marked(str(ground_truth)))
    if not truth:
        raise ValueError(f"the ground truth {ground_truth!r:.100} is no expression")
    answer = _last_boxes(after_thoughts(solution_str))
    found = _parsed(answer)
    if not found:
        return {"score": 0.0, "answer": None}
    texts = (str(ground_truth), answer)
    units = [[form.findall(text)[-1:] for text in texts] for form in _UNITS]
    read = not _UNREAD.search(answer) or answer == f"$\\boxed{{{ground_truth}}}$"
    same_unit = all(one == other or not (one and other) for one, other in units)
    equal = read and same_unit and _equal(truth, found)
    return {"score": float(equal), "answer": str(found[0])}


def _parsed(text: str) -> list[Any]:
    """Return what the parser reads: an expression and its text, only the text, or nothing."""
    text = _GROUPED.sub(lambda number: re.sub(r"\D", "", number[0]), text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    return cast(list[Any], parse(text, parsing_timeout=None))


def _equal(truth: Sequence[Any], found: Sequence[Any]) -> bool:
    """Compare by their texts what the parser would confuse, and all else as expressions."""
    texts = [_bare(str(side[-1])) for side in (truth, found)]
    if any(form.fullmatch(text) for form in (_IN_A_BASE, _NAME) for text in texts):
        return texts[0] == texts[1]
    if {text[:1] for text in texts} in ({"{", "("}, {"{", "["}):
        return False  # a set is no tuple and no interval
    if texts[0] != texts[1] and texts[0].lower() == texts[1].lower() and "\\" in texts[0]:
        return False  # \\theta is not \\Theta
    return _same(truth, found)


def _bare(text: str) -> str:
    """The text without spaces, fonts and signs of size."""
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf) ?\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\(?:left|right|[!,; ])|\\(?=[{}%])|[\s$]", "", text)
    return re.sub(r"_\{(\w+)\}", r"_\1", re.sub(r"^\(([A-Za-z])\)$", r"\1", text))


def _same(truth: Sequence[Any], found: Sequence[Any]) -> bool:
    equal: bool = verify(
        list(truth), list(found), allow_set_relation_comp=True, timeout_seconds=None
    )
    left, right = truth[0], found[0]
    if not all(getattr(side, "is_number", False) and side.is_finite for side in (left, right)):
        return equal
    if left.is_integer and right.is_integer:
        return equal
    # `verify` rounds to six decimals, so that 1e-7 would be 2e-7.
    difference, largest = abs((left - right).evalf()), max(abs(left.evalf()), abs(right.evalf()))
    return bool(difference <= (_ROUNDED if equal else _EXACT) * largest)


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
        boxes.append(f"$\\boxed{{{solution[found.end() : end]}$")
    return " and ".join(reversed(boxes)) or solution


def _closing(text: str, start: int) -> int:
    """Return the position after the brace that closes the one before `start`."""
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if not depth:
            return position + 1
    return len(text)
