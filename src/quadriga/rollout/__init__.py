"""Rollout engines: they sample responses to prompts.

- this file: how tokens are sampled (`SamplingParams`), and what an engine can do of it
  (`RolloutAbilities`); `Rollout`, what the trainer knows of an engine before it is started; the
  table `ROLLOUTS` of all engines, and `register_rollout`, which adds one.
- `base`: `RolloutEngine`, a started engine; checks of its requests, and the digest of a weight.
- `guard`: around any engine: checks of requests, of outputs and of new weights, and a deadline.
- `responses`: lists of tokens as one output, and stop strings.
- `hf`: generation in this process with a Hugging Face model.
- `vllm`: generation in this process with vLLM, from an environment of its own.
- `sglang`: generation in processes below this one, or by a server, with SGLang.

May import every package below `rollout` in docs/architecture.md, but not `engines`. Importing this
file imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from quadriga.algorithms.user_files import running_user_file
from quadriga.config.schema import RolloutEngineConfig
from quadriga.errors import ConfigError, RolloutAbilityError, unknown_name
from quadriga.lazy import imported

if TYPE_CHECKING:
    import torch

    from quadriga.config.schema import (
        DtypeName,
        LoraConfig,
        ModelConfig,
        RolloutConfig,
        SamplingConfig,
    )
    from quadriga.models.limits import LongestSequence
    from quadriga.models.memory import EngineMemory
    from quadriga.rollout.base import RolloutEngine
    from quadriga.rollout.memory import GenerationUse

ROLLOUT_KEY = "actor_rollout_ref.rollout"
"""The section of the rollout in the settings, for messages."""

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

_DEFAULTS = {
    f.name: f.default for f in fields(SamplingParams) if f.name in get_args(SamplingSetting)
}
ALL_SETTINGS: frozenset[SamplingSetting] = frozenset(get_args(SamplingSetting))
"""Every setting that an engine may be unable to apply."""


@dataclass(frozen=True)
class RolloutAbilities:
    """What one engine can do with the model that it holds.

    Attributes:
        vocabulary: token ids are below this number.
        window: the most tokens of prompt and response together; None if there is no limit.
        log_probs: the kinds that the engine can give.
        settings: the settings that it applies at values other than their default.
        seeded: equal prompt, seed and weights give an equal response in an equal batch.
        batch_invariant: in float32 the response of a row depends neither on the other rows nor on
            the number of replicas. Meaningful only if `seeded`, or if greedy.
        exposes_weights: `weights_digest` is offered.
    """

    vocabulary: int
    window: int | None
    log_probs: frozenset[LogProbKind]
    settings: frozenset[SamplingSetting]
    seeded: bool
    batch_invariant: bool
    exposes_weights: bool

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


# Engines before they are started


class Rollout:
    """A rollout engine with its settings, before it is started.

    A subclass is importable without torch and without the engine's own package, because settings
    are checked before a worker starts; `build` imports them. The methods here are right for an
    engine that applies all sampling settings, has no options, and holds a copy on each rank.

    Args:
        settings: the section `rollout`. `settings.options` is for this engine alone.

    Attributes:
        engine: "module:class" of the `RolloutEngine`, which is imported when it is built.
        computes_images: it generates from prompts with images.
    """

    engine: ClassVar[str] = ""
    computes_images: ClassVar[bool] = False
    sampling_settings: ClassVar[frozenset[SamplingSetting]] = ALL_SETTINGS

    def __init__(self, settings: RolloutEngineConfig) -> None:
        self.settings = settings

    def abilities(self, vocabulary: int, window: int | None) -> RolloutAbilities:
        """Return what the engine can do with a model of this vocabulary and context window."""
        return RolloutAbilities(
            vocabulary=vocabulary,
            window=window,
            log_probs=ALL_LOG_PROBS,
            settings=self.sampling_settings,
            seeded=True,
            batch_invariant=True,
            exposes_weights=True,
        )

    @property
    def ranks_of_copy(self) -> int:
        """How many ranks hold one copy of the weights, and generate the same rows."""
        return 1

    def check(self, ranks: int | None) -> None:
        """Raise `ConfigError` if the engine is not installed, or an option does not fit.

        Args:
            ranks: how many ranks the rollout has, if that is known.
        """
        if self.settings.options:
            key = f"{ROLLOUT_KEY}.options"
            raise ConfigError(
                f"rollout engine {self.settings.name!r} has no options "
                f"{sorted(self.settings.options)}; remove them from {key}",
                key=key,
            )

    def check_updates(self, ranks: int | None, *, take_turns: bool) -> None:
        """Raise `ConfigError` if a training run cannot update the weights of the engine.

        Args:
            take_turns: its memory is released while the actor trains.
        """

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Raise `RolloutAbilityError` if the engine cannot sample with these settings."""
        params = SamplingParams(
            max_new_tokens=max(1, sampling.min_new_tokens),
            eos_token_ids=(0,),
            pad_token_id=0,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            min_new_tokens=sampling.min_new_tokens,
        )
        self.abilities(1, None).check(params, self.settings.name)

    def check_window(self, model: ModelConfig, longest: LongestSequence) -> None:
        """Raise `ConfigError` if the engine's own options exclude the longest sequence.

        The window of the model is compared by `check_context_window`.
        """

    def not_reproduced(self, sampling: SamplingConfig) -> str:
        """Return why the engine cannot generate the same again; "" if it can in float32."""
        return ""

    def loads_adapters(self, lora: LoraConfig) -> bool:
        """Return whether the engine can compute with the adapters of a model beside its weights."""
        return False

    def memory(self, model: ModelConfig, use: GenerationUse) -> EngineMemory:
        """Return what the engine holds and adds on a rank. By default it is not known.

        Raises:
            ModelError: the folder has no config of a causal language model.
        """
        from quadriga.models.memory import EngineMemory

        missing = f"rollout (engine {self.settings.name})"
        return EngineMemory({}, {"generate": {}}, missing=missing)

    def build(
        self,
        model: ModelConfig,
        device: str | torch.device,
        *,
        releasable: bool,
        copies: Sequence[tuple[int, ...]] | None,
    ) -> RolloutEngine:
        """Start the engine on this rank: `engine(self, model, device, releasable, copies)`.

        Args:
            model: with its adapters only if the engine loads them.
            device: of this rank, or its type ("cuda").
            releasable: `release` will be called.
            copies: the ranks that hold each copy of the weights together; None: neighbours.

        Raises:
            ConfigError: the engine is not installed.
            ModelError: the folder does not hold a causal language model that it computes.
        """
        self.check(None)
        engine: RolloutEngine = imported(self.engine)(
            self, model, device, releasable=releasable, copies=copies
        )
        return engine


ROLLOUTS: dict[str, str | type[Rollout]] = {
    "hf": "quadriga.rollout.hf:HF",
    "vllm": "quadriga.rollout.vllm.options:VLLM",
    "sglang": "quadriga.rollout.sglang.options:SGLang",
}
"""Name -> the `Rollout`, or "module:class" of one that is imported when it is used."""
REFERENCE = "hf"
"""The engine with which others are compared."""

_ORIGINS = dict.fromkeys(ROLLOUTS, "Quadriga")


def register_rollout(name: str, cls: type[Rollout]) -> None:
    """Add a rollout engine, `rollout.name=<name>`, in a file of `algorithm.user_files`.

    Raises:
        ConfigError: the name is taken. A file that is loaded again replaces its own engines.
    """
    origin = running_user_file() or ""
    if _ORIGINS.get(name, origin) != origin:
        raise ConfigError(
            f"the rollout engine {name!r} is registered by {_ORIGINS[name]}; choose another name",
            key=f"{ROLLOUT_KEY}.name",
        )
    ROLLOUTS[name], _ORIGINS[name] = cls, origin


def rollout_of(settings: RolloutEngineConfig) -> Rollout:
    """Return the engine that the settings name.

    Raises:
        UnknownNameError: there is no engine of that name.
        ConfigError: an option is unknown or out of range.
    """
    found = ROLLOUTS.get(settings.name)
    if found is None:
        raise unknown_name("rollout engine", settings.name, ROLLOUTS)
    rollout: Rollout = (imported(found) if isinstance(found, str) else found)(settings)
    return rollout


def loads_adapters(rollout: RolloutConfig, lora: LoraConfig) -> bool:
    """Return whether the engine of a run computes with the actor's adapters beside its weights.

    Otherwise it receives weights into which they are merged.
    """
    wanted = lora.enabled and rollout.load_adapters is not False
    return wanted and rollout_of(rollout).loads_adapters(lora)


def check_adapters(rollout: RolloutConfig, lora: LoraConfig) -> None:
    """Raise `ConfigError` if `load_adapters` is set and cannot be done."""
    key = f"{ROLLOUT_KEY}.load_adapters"
    if rollout.load_adapters is None:
        return
    if not lora.enabled:
        raise ConfigError(
            f"{key} is set, but the model has no adapters; set actor_rollout_ref.model.lora.rank, "
            f"or remove {key}",
            key=key,
        )
    if rollout.load_adapters and not loads_adapters(rollout, lora):
        raise ConfigError(
            f"{key}=true needs rollout.name=vllm with tensor_parallel_size=1 and adapters of rank "
            f"512 or less, got name={rollout.name}; set it to "
            "null, and the adapters are merged into the weights that the engine receives",
            key=key,
        )


def build_rollout(
    name: str,
    model: ModelConfig,
    *,
    device: str | torch.device = "cpu",
    dtype: DtypeName = "auto",
    micro_batch_size: int = 256,
    releasable: bool = True,
    copies: Sequence[tuple[int, ...]] | None = None,
    **options: object,
) -> RolloutEngine:
    """Start the rollout engine `name`. See `Rollout.build` for the arguments and errors.

    Args:
        dtype: of weights and computation; "auto" is float32 on a CPU and bfloat16 elsewhere.
        micro_batch_size: rows that are generated at once.
        options: the engine's own options (setting `rollout.options`).
    """
    settings = RolloutEngineConfig(name, micro_batch_size, dtype, options)
    return rollout_of(settings).build(model, device, releasable=releasable, copies=copies)
