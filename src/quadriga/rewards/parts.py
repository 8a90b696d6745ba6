"""Several rewards with weights: the parts of the score of a response.

    reward.parts={correct: {weight: 1.0}, short: {path: my_rules.py, name: is_short, weight: 0.2}}

Each part is a rule function; one without `path` is the function of the row's data source. The score
of a response is the sum of weight × score over the parts:

    part       score    weight
    correct    1.0      1.0
    short      0.5      0.2        score of the response: 1.1
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quadriga.config.schema import RewardConfig
from quadriga.errors import ConfigError
from quadriga.rewards.functions import FunctionRef, RewardFunction, load_reward_function
from quadriga.rewards.outcome import SCORED, Outcome

_KEYS = ("weight", "path", "name")


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
    return tuple(_part(name, value) for name, value in settings.parts.items())


def _part(name: str, value: object) -> RewardPart:
    key = f"reward.parts.{name}"
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} must be a mapping of {', '.join(_KEYS)}, got {value!r}", key=key)
    for given in value:
        if given not in _KEYS:
            near = difflib.get_close_matches(str(given), _KEYS, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(_KEYS)}"
            raise ConfigError(f"no setting {key}.{given}{hint}", key=f"{key}.{given}")
    weight, path = value.get("weight", 1.0), value.get("path")
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not number or not math.isfinite(weight):
        raise ConfigError(f"{key}.weight must be a number, got {weight!r}", key=f"{key}.weight")
    if path is None and "name" in value:
        raise ConfigError(
            f"{key}.name selects a function in the file {key}.path, which is not set", key=key
        )
    function = None
    if path is not None:
        function = load_reward_function(str(path), str(value.get("name", "compute_score")))
    return RewardPart(name, float(weight), function)


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
