"""`SamplingParams`: how tokens are sampled, the same for every rollout engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from quadriga.errors import ConfigError

LogProbKind = Literal["policy", "sampled", "temperature_1"]
"""The distribution that `rollout_log_probs` are of.

- `policy`: at the sampling temperature (1 if greedy), before the filters. Training computes it.
- `sampled`: the distribution from which the token was drawn, after temperature and filters and
  renormalised. It is 0 for each token if greedy.
- `temperature_1`: of the logits as they are.
"""


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
        kinds = get_args(LogProbKind)
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
            f"log_probs must be one of {', '.join(kinds)}": self.log_probs not in kinds,
        }
        for problem, found in problems.items():
            if found:
                raise ConfigError(f"sampling: {problem}; got {self}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken instead of a random one."""
        return self.temperature == 0

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a response."""
        eos = () if self.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*eos, *self.stop_token_ids)))

    @property
    def filters(self) -> tuple[str, ...]:
        """The names of the settings that exclude tokens from the draw."""
        excludes = {
            "top_k": self.top_k != -1,
            "top_p": self.top_p < 1,
            "min_p": self.min_p > 0,
            "min_new_tokens": self.min_new_tokens > 0 and bool(self.end_token_ids),
            "excluded_token_ids": bool(self.excluded_token_ids),
        }
        return tuple(name for name, active in excludes.items() if active)
