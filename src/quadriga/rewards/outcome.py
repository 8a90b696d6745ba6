"""One sample to score, the outcome of scoring it, and the message that carries an outcome.

A reward function is code of the user, so every part of an outcome is bounded in size, and an
outcome is sent between processes as JSON: reading it runs no code.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final, Literal

from pydantic import ConfigDict, TypeAdapter

from quadriga.config.convert import build
from quadriga.config.schema import RewardConfig
from quadriga.containment import cut, describe
from quadriga.errors import ConfigError
from quadriga.rewards.functions import FunctionRef, RewardFunction, load_reward_function

Status = Literal["scored", "raised", "timed_out", "crashed"]
SCORED: Final = "scored"
RAISED: Final = "raised"
TIMED_OUT: Final = "timed_out"
CRASHED: Final = "crashed"
FAILURES: tuple[Status, ...] = (RAISED, TIMED_OUT, CRASHED)

MAX_EXTRAS = 64  # entries of the dict that a function returns besides its score
MAX_NAME = 100  # characters of the key of such an entry
MAX_TEXT = 1000  # characters of the value of such an entry, if it is a text


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

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    status: Status
    score: float = 0.0
    extra: dict[str, float | str] = field(default_factory=dict)
    detail: str = ""


@dataclass(frozen=True)
class Report:
    """A message from a process of the pool: which process, which sample, and its outcome.

    `sample` and `process` are compared with those that the pool is waiting for, so that a copy of
    the process that a function has forked cannot report a score for another sample.

    Attributes:
        sample: the number that the pool gave to the sample; -1 when the process is ready.
        outcome: None when the process is ready, and when the function is about to be called.
    """

    sample: int
    process: int
    outcome: Outcome | None = None

    def encode(self) -> bytes:
        """Return the message as JSON."""
        return json.dumps([self.sample, self.process, self.outcome and vars(self.outcome)]).encode()

    @classmethod
    def decode(cls, message: bytes) -> Report:
        """Return the report of a message. Raises `ValueError` if the message is no report."""
        try:
            return cls(*_report_form().validate_json(message, strict=True))
        except ValueError as error:
            raise ValueError(f"not a report: {' '.join(str(error).split())}") from error


@cache
def _report_form() -> TypeAdapter[tuple[int, int, Outcome | None]]:
    return TypeAdapter(tuple[int, int, Outcome | None])


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
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # `SystemExit` and `CancelledError` are no `Exception`
        # The function is code of the user: one sample that fails must not end the run.
        return Outcome(RAISED, detail=describe(error))


def _outcome(value: object) -> Outcome:
    """Convert the return value of a rule function, a number or a dict with "score"."""
    extra: dict[str, float | str] = {}
    if isinstance(value, Mapping):
        if "score" not in value:
            raise TypeError(f"a returned dict needs 'score', got {sorted(map(str, value))}")
        if len(value) > MAX_EXTRAS + 1:
            raise ValueError(
                f"a returned dict has {len(value)} entries; 'score' and at most {MAX_EXTRAS} "
                "others are allowed"
            )
        others = {k: v for k, v in value.items() if k != "score" and v is not None}
        extra = plain_extras(others)
        value = value["score"]
    # `__float__` and not `float`: a score may be a numpy or torch scalar.
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"a score must be a number, got {type(value).__name__}")
    score = float(value)
    if not math.isfinite(score):
        raise ValueError(f"a score must be finite, got {score}")
    return Outcome(SCORED, score, extra)


def plain_extras(values: Mapping[object, object]) -> dict[str, float | str]:
    """Return what a function returned besides its score, as numbers and texts of bounded size."""
    return {cut(str(name), MAX_NAME): _plain(value) for name, value in values.items()}


def _plain(value: object) -> float | str:
    """Return a number or the text of a value, which can be sent as JSON and logged."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()  # a scalar of numpy or torch, also a boolean
    return float(value) if isinstance(value, numbers.Real) else cut(str(value), MAX_TEXT)


@dataclass(frozen=True)
class _PartSettings:
    """The settings of an entry of `reward.parts`."""

    weight: float = 1.0
    path: str | None = None  # None: the function of the row's data source
    name: str = "compute_score"


@dataclass(frozen=True)
class RewardPart:
    """One part of the score.

    Attributes:
        name: under which its score is logged; "" for the only part, which is not logged by itself.
        function: None: the function of the row's data source.
    """

    name: str
    weight: float
    function: FunctionRef | RewardFunction | None


def parts_of(settings: RewardConfig) -> tuple[RewardPart, ...]:
    """Return the parts that the settings describe: one, unless `reward.parts` names several.

    Raises:
        ConfigError: a part is not a mapping of `weight`, `path` and `name`, or `reward.path` is set
            beside `reward.parts`.
        InputError: a function cannot be loaded.
    """
    if not settings.parts:
        function = load_reward_function(settings.path, settings.name) if settings.path else None
        return (RewardPart("", 1.0, function),)
    if settings.path is not None:
        raise ConfigError(
            "reward.path and reward.parts both say what scores a response; move the path into a "
            "part: reward.parts={own: {path: …}}",
            key="reward.parts",
        )
    parts = []
    for name, value in settings.parts.items():
        key = f"reward.parts.{name}"
        part = build(_PartSettings, value, prefix=f"{key}.")
        if part.path is None and "name" in value:
            raise ConfigError(
                f"{key}.name selects a function in the file {key}.path, which is not set", key=key
            )
        function = load_reward_function(part.path, part.name) if part.path else None
        parts.append(RewardPart(name, part.weight, function))
    return tuple(parts)


def combined(parts: Sequence[RewardPart], outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of a response from those of its parts.

    The scores of the parts are its `extra` under their names, and what a part has returned besides
    is there as `part/key`. If a part fails, the response has no score.
    """
    if len(parts) == 1 and not parts[0].name:
        return outcomes[0]
    for part, outcome in zip(parts, outcomes, strict=True):
        if outcome.status != SCORED:
            return Outcome(outcome.status, detail=f"{part.name}: {outcome.detail}")
    pairs = list(zip(parts, outcomes, strict=True))
    extra: dict[str, float | str] = {part.name: outcome.score for part, outcome in pairs}
    for part, outcome in pairs:
        extra |= {f"{part.name}/{key}": value for key, value in outcome.extra.items()}
    return Outcome(SCORED, math.fsum(p.weight * outcome.score for p, outcome in pairs), extra)
