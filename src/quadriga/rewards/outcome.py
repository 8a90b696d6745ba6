"""One sample to be scored, and what became of it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quadriga.rewards.functions import FunctionRef, RewardFunction

SCORED = "scored"
RAISED = "raised"
TIMED_OUT = "timed_out"
CRASHED = "crashed"
FAILURES = (RAISED, TIMED_OUT, CRASHED)


@dataclass(frozen=True)
class Sample:
    """The four arguments of a rule function, and which function it is."""

    function: FunctionRef
    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: Any


@dataclass(frozen=True)
class Outcome:
    """A score, or why there is none: `status` is `scored`, `raised`, `timed_out` or `crashed`.

    A sample without a score counts as 0. `extra` holds the other entries of a returned dict.
    """

    status: str
    score: float = 0.0
    extra: dict[str, float | str] = field(default_factory=dict)
    detail: str = ""


def call(function: RewardFunction, sample: Sample) -> Outcome:
    """Score one sample; whatever the function raises is contained in the outcome."""
    try:
        value = function(
            data_source=sample.data_source,
            solution_str=sample.solution_str,
            ground_truth=sample.ground_truth,
            extra_info=sample.extra_info,
        )
        return _outcome(value)
    except (Exception, SystemExit) as error:
        # A reward function is the user's code: one bad sample must not end a run of days.
        return Outcome(RAISED, detail=f"{type(error).__name__}: {error}")


def _outcome(value: Any) -> Outcome:
    extra: dict[str, float | str] = {}
    if isinstance(value, Mapping):
        if "score" not in value:
            raise TypeError(f"a returned dict needs 'score', got {sorted(map(str, value))}")
        extra = {str(k): _plain(v) for k, v in value.items() if k != "score"}
        value = value["score"]
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"a score must be a number, got {type(value).__name__}")
    score = float(value)
    if not math.isfinite(score):
        raise ValueError(f"a score must be finite, got {score}")
    return Outcome(SCORED, score, extra)


def _plain(value: Any) -> float | str:
    """A number or a text: what can be logged, and cross processes whatever the user's types."""
    return float(value) if isinstance(value, numbers.Real) else str(value)
