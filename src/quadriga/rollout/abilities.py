"""How tokens are sampled (`SamplingParams`), and what an engine can do of it (`RolloutAbilities`).

An engine refuses what its declaration excludes by `RolloutAbilityError`. It never returns another
number in place of the one that was requested. Importing this file imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

from quadriga.config.schema import SamplingConfig
from quadriga.errors import ConfigError, RolloutAbilityError

LogProbKind = Literal["policy", "sampled", "temperature_1"]
"""The distribution that `rollout_log_probs` are of.

- `policy`: at the sampling temperature (1 if greedy), before the filters. Training computes it.
- `sampled`: the distribution from which the token was drawn, after temperature and filters and
  renormalised. It is 0 for each token if greedy.
- `temperature_1`: of the logits as they are.
"""
ALL_LOG_PROBS: frozenset[LogProbKind] = frozenset(get_args(LogProbKind))


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled, the same for every engine.

    The logits are divided by the temperature; then the filters top-k, top-p and min-p exclude
    tokens; then one token is drawn. A response ends with an end token (`end_token_ids`), with the
    token that completes a stop string, or after `max_new_tokens` tokens. It contains the token that
    ends it.

    Attributes:
        eos_token_ids: the end tokens of the model.
        temperature: 0 is greedy.
        top_p: 1 allows the whole vocabulary. Otherwise a token is kept if the more likely tokens
            together have less than this probability.
        top_k: -1 allows the whole vocabulary.
        min_p: excludes tokens with less than `min_p` times the probability of the most likely
            token; 0 allows the whole vocabulary.
        min_new_tokens: an end token is excluded while the response has fewer tokens, and a stop
            string that is completed before this length does not end it.
        stop_token_ids: more end tokens. They end a response also with `ignore_eos`.
        stop_strings: a response ends with the token that completes one of them in its text. The
            token ids stay as they were sampled.
        ignore_eos: `eos_token_ids` do not end a response. They can still be sampled.
        excluded_token_ids: never sampled, such as the tokens that stand for images.
        log_probs: the distribution of `RolloutOutput.rollout_log_probs`; see `LogProbKind`.

    Raises:
        ConfigError: a value is out of range.
    """

    max_new_tokens: int
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    excluded_token_ids: tuple[int, ...] = ()
    log_probs: LogProbKind = "policy"

    def __post_init__(self) -> None:
        problems = {
            "max_new_tokens must be at least 1": self.max_new_tokens < 1,
            "temperature must be 0 (greedy) or above": not 0 <= self.temperature < math.inf,
            "top_p must be above 0 and at most 1": not 0 < self.top_p <= 1,
            "top_k must be -1 (all) or at least 1": self.top_k != -1 and self.top_k < 1,
            "min_p must be at least 0 and at most 1": not 0 <= self.min_p <= 1,
            "min_new_tokens must be at least 0 and at most max_new_tokens": (
                not 0 <= self.min_new_tokens <= self.max_new_tokens
            ),
            "eos_token_ids, stop_token_ids and excluded_token_ids must be at least 0": any(
                token < 0
                for token in (*self.eos_token_ids, *self.stop_token_ids, *self.excluded_token_ids)
            ),
            "excluded_token_ids must not have tokens that end a response": bool(
                {*self.excluded_token_ids} & {*self.eos_token_ids, *self.stop_token_ids}
            ),
            "stop_strings must be a tuple of strings that are not empty": (
                isinstance(self.stop_strings, str) or not all(self.stop_strings)
            ),
        }
        for problem, found in problems.items():
            if found:
                raise ConfigError(f"sampling: {problem}; got {self}")

    @classmethod
    def of(
        cls,
        settings: SamplingConfig,
        max_new_tokens: int,
        pad: int = 0,
        ends: tuple[int, ...] = (),
        excluded: tuple[int, ...] = (),
    ) -> SamplingParams:
        """Return the settings of a run, with the padding, end and excluded tokens of a model."""
        same = dict(vars(settings))
        same["stop_strings"] = same.pop("stop")  # the others have the same names here
        return cls(max_new_tokens, ends, pad, excluded_token_ids=excluded, **same)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken instead of a random one."""
        return self.temperature == 0

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a response."""
        eos = () if self.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*eos, *self.stop_token_ids)))


SamplingSetting = Literal[
    "temperature", "top_p", "top_k", "min_p", "min_new_tokens", "stop_token_ids", "stop_strings",
    "ignore_eos", "excluded_token_ids",
]  # fmt: skip
"""A setting of `SamplingParams` that an engine may be unable to apply."""

ALL_SETTINGS: frozenset[SamplingSetting] = frozenset(get_args(SamplingSetting))
"""Every setting that an engine may be unable to apply."""
_DEFAULTS = {f.name: f.default for f in fields(SamplingParams) if f.name in ALL_SETTINGS}


@dataclass(frozen=True)
class RolloutAbilities:
    """What one engine can do with the model that it holds. By default everything.

    Attributes:
        vocabulary: token ids are below this number.
        window: the most tokens of prompt and response together; None if there is no limit.
        log_probs: the kinds that the engine can give.
        settings: the settings that it applies at values other than their default.
        seeded: equal prompt, seed and weights give an equal response in an equal batch.
        batch_invariant: in float32 the response of a row depends neither on the other rows nor on
            the number of replicas. Meaningful only if `seeded`, or if greedy.
        exposes_weights: `weights_digest` is offered.
        continues: `generate` takes `continued`: it can pause a response and continue it later.
        file_names: its weights have the names and shapes of the model's files, not transformers'.
    """

    vocabulary: int
    window: int | None
    log_probs: frozenset[LogProbKind] = ALL_LOG_PROBS
    settings: frozenset[SamplingSetting] = ALL_SETTINGS
    seeded: bool = True
    batch_invariant: bool = True
    exposes_weights: bool = True
    continues: bool = False
    file_names: bool = False

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
        if sampling.log_probs not in self.log_probs:
            raise RolloutAbilityError(
                f"rollout engine {engine!r} cannot give {sampling.log_probs!r} log-probabilities; "
                f"request {' or '.join(sorted(self.log_probs))}, or use another engine "
                "(rollout.name)",
                engine=engine,
                setting="log_probs",
            )
