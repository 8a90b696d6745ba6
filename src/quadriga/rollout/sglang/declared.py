"""What an SGLang that is started with given options can do. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from quadriga.rollout.abilities import (
    ALL_SETTINGS,
    LogProbCondition,
    RolloutAbilities,
    SamplingSetting,
)
from quadriga.rollout.params import LogProbKind
from quadriga.rollout.sglang.options import SGLangOptions

# What SGLang returns are log-probabilities at the temperature, before the filters; started with
# SGLANG_RETURN_ORIGINAL_LOGPROB they are at temperature 1.
_LOG_PROBS: Mapping[str, Mapping[LogProbKind, LogProbCondition]] = {
    "policy": {
        "policy": "always",
        "sampled": "unfiltered",
        "temperature_1": "at temperature 1",
    },
    "temperature_1": {"temperature_1": "always", "policy": "at temperature 1"},
}


def declared_abilities(
    options: SGLangOptions, vocabulary: int, window: int | None, *, exposes_weights: bool
) -> RolloutAbilities:
    """Return the abilities of an SGLang with these options."""
    # `min_new_tokens` of SGLang needs its tokenizer, and its log-probabilities are then of neither
    # kind. Its seeds do not work with min_p.
    unable: set[SamplingSetting] = {"min_new_tokens", "excluded_token_ids"}
    settings = ALL_SETTINGS - unable - ({"min_p"} if options.seeds else frozenset())
    return RolloutAbilities(
        vocabulary=vocabulary,
        window=window,
        log_probs=_LOG_PROBS[options.log_probs],
        settings=settings,
        filter_order="joint",
        seeded=options.seeds,
        batch_invariant=False,
        exposes_weights=exposes_weights,
    )
