"""One sample to score, and the outcome of scoring it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from quadriga.rewards.functions import FunctionRef, RewardFunction

Status = Literal["scored", "raised", "timed_out", "crashed"]
SCORED: Final = "scored"
RAISED: Final = "raised"
TIMED_OUT: Final = "timed_out"
CRASHED: Final = "crashed"
FAILURES: tuple[Status, ...] = (RAISED, TIMED_OUT, CRASHED)


@dataclass(frozen=True)
class Sample:
    """The four arguments of a rule function, and the function to call."""

    function: FunctionRef
    data_source: str
    solution_str: str
    ground_truth: object
    extra_info: object


@dataclass(frozen=True)
class Outcome:
    """A score, or the reason why there is none.

    Attributes:
        status: "scored", or what went wrong.
        score: 0 if the sample was not scored.
        extra: the other entries of the dict that the function returned.
        detail: the exception, the deadline or the exit code, for messages.
    """

    status: Status
    score: float = 0.0
    extra: dict[str, float | str] = field(default_factory=dict)
    detail: str = ""


def call(function: RewardFunction, sample: Sample) -> Outcome:
    """Score one sample. An exception of the function becomes an outcome with status "raised"."""
    try:
        value = function(
            data_source=sample.data_source,
            solution_str=sample.solution_str,
            ground_truth=sample.ground_truth,
            extra_info=sample.extra_info,
        )
        return _outcome(value)
    except (Exception, SystemExit) as error:
        # The function is code of the user: one sample that fails must not end the run.
        return Outcome(RAISED, detail=f"{type(error).__name__}: {error}")


def _outcome(value: object) -> Outcome:
    """Convert the return value of a rule function, a number or a dict with "score"."""
    extra: dict[str, float | str] = {}
    if isinstance(value, Mapping):
        if "score" not in value:
            raise TypeError(f"a returned dict needs 'score', got {sorted(map(str, value))}")
        extra = {str(k): _plain(v) for k, v in value.items() if k != "score"}
        value = value["score"]
    # `__float__` and not `float`: a score may be a numpy or torch scalar.
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"a score must be a number, got {type(value).__name__}")
    score = float(value)
    if not math.isfinite(score):
        raise ValueError(f"a score must be finite, got {score}")
    return Outcome(SCORED, score, extra)


def _plain(value: object) -> float | str:
    """Return a number or the text of a value, which other processes can unpickle and log."""
    return float(value) if isinstance(value, numbers.Real) else str(value)
