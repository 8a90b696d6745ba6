"""What a rollout engine can do, as a declaration that users, the guard and the tests read.

An engine refuses what its declaration excludes by `RolloutAbilityError`. It never returns another
number in place of the one that was requested.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from quadriga.errors import RolloutAbilityError
from quadriga.rollout.params import LogProbKind, SamplingParams

LogProbCondition = Literal[
    "always", "unfiltered", "at temperature 1", "unfiltered or at temperature 1", "never"
]
"""When an engine can give one kind of log-probabilities.

"unfiltered": `SamplingParams.filters` is empty. "at temperature 1": the temperature is 1, or 0.
"""

SamplingSetting = Literal[
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_new_tokens",
    "stop_token_ids",
    "stop_strings",
    "ignore_eos",
    "excluded_token_ids",
]
"""A setting of `SamplingParams` that an engine may be unable to apply."""

FilterOrder = Literal["top_k, top_p, min_p", "min_p, top_k, top_p", "joint"]
"""How several filters act together.

In an order, each filter renormalises what the filters before it kept: with the probabilities
.4 .3 .2 .1, top_k 2 keeps .57 .43, of which top_p 0.5 keeps the first. With "joint", each filter
reads the probabilities before all filters: top_p 0.5 keeps .4 .3, and top_k 2 keeps the same two.
"""

_DEFAULTS: dict[SamplingSetting, object] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "min_new_tokens": 0,
    "stop_token_ids": (),
    "stop_strings": (),
    "ignore_eos": False,
    "excluded_token_ids": (),
}
ALL_SETTINGS: frozenset[SamplingSetting] = frozenset(_DEFAULTS)
"""Every setting that an engine may be unable to apply."""


@dataclass(frozen=True)
class RolloutAbilities:
    """What one engine can do with the model that it holds.

    Attributes:
        vocabulary: token ids are below this number.
        window: the most tokens of prompt and response together; None if there is no limit.
        log_probs: for each kind, when the engine can give it. A kind that is missing: never.
        settings: the settings that it applies at values other than their default.
        filter_order: how several filters act together.
        seeded: equal prompt, seed and weights give an equal response in an equal batch.
        batch_invariant: in float32 the response of a row depends neither on the other rows nor on
            the number of replicas. Meaningful only if `seeded`, or if greedy.
        exposes_weights: `weights_digest` is offered.
    """

    vocabulary: int
    window: int | None
    log_probs: Mapping[LogProbKind, LogProbCondition]
    settings: frozenset[SamplingSetting]
    filter_order: FilterOrder
    seeded: bool
    batch_invariant: bool
    exposes_weights: bool

    def gives_log_probs(self, sampling: SamplingParams) -> bool:
        """Return whether the engine can give `sampling.log_probs` with these settings."""
        condition = self.log_probs.get(sampling.log_probs, "never")
        unfiltered = not sampling.filters
        at_one = sampling.temperature in (0, 1)
        return {
            "always": True,
            "unfiltered": unfiltered,
            "at temperature 1": at_one,
            "unfiltered or at temperature 1": unfiltered or at_one,
            "never": False,
        }[condition]

    def check(self, sampling: SamplingParams, engine: str) -> None:
        """Check that the engine can do what `sampling` asks.

        Args:
            engine: its name, for the message.

        Raises:
            RolloutAbilityError: it cannot. Attributes: `engine`, `setting`.
        """
        for setting, default in _DEFAULTS.items():
            value = getattr(sampling, setting)
            if value != default and setting not in self.settings:
                raise RolloutAbilityError(
                    f"rollout engine {engine!r} cannot apply {setting}={value!r}; it applies "
                    f"{', '.join(sorted(self.settings)) or 'no setting'}. Set {setting} to "
                    f"{default!r} or use another engine (rollout.name)",
                    engine=engine,
                    setting=setting,
                )
        if not self.gives_log_probs(sampling):
            kind = sampling.log_probs
            raise RolloutAbilityError(
                f"rollout engine {engine!r} cannot give {kind!r} log-probabilities with "
                f"temperature {sampling.temperature} and the filters "
                f"{', '.join(sampling.filters) or 'none'}; it gives them: "
                f"{self.log_probs.get(kind, 'never')}. Change these settings, request "
                f"{self._possible(sampling)}, or use another engine (rollout.name)",
                engine=engine,
                setting="log_probs",
            )

    def _possible(self, sampling: SamplingParams) -> str:
        """Name the kinds that the engine can give with these settings."""
        kinds = [k for k in self.log_probs if self.gives_log_probs(replace(sampling, log_probs=k))]
        return " or ".join(repr(kind) for kind in kinds) or "no log-probabilities of this engine"
