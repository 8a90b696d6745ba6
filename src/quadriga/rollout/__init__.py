"""Rollout engines: they sample responses to prompts.

- this file: `Rollout`, what the trainer knows of an engine before it is started; the table
  `ROLLOUTS` of all engines, and `register_rollout`, which adds one.
- `base`: `RolloutEngine`, a started engine; checks of its requests, and the digest of a weight.
- `abilities`: how tokens are sampled, and what an engine can do of it.
- `guard`: around any engine: checks of requests, of outputs and of new weights, and a deadline.
- `responses`: lists of tokens as one output, and stop strings.
- `hf`: generation in this process with a Hugging Face model.
- `vllm`: generation in this process with vLLM, from an environment of its own.
- `sglang`: generation in processes below this one, or by a server, with SGLang.

May import every package below `rollout` in docs/architecture.md, but not `engines`. Importing this
file imports no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from quadriga.algorithms.user_files import running_user_file
from quadriga.config.schema import RolloutConfig, RolloutEngineConfig
from quadriga.errors import ConfigError, unknown_name
from quadriga.lazy import imported
from quadriga.rollout.abilities import (
    ALL_SETTINGS,
    RolloutAbilities,
    SamplingParams,
    SamplingSetting,
)

if TYPE_CHECKING:
    import torch

    from quadriga.config.schema import (
        DtypeName,
        LoraConfig,
        ModelConfig,
        SamplingConfig,
    )
    from quadriga.models.limits import LongestSequence
    from quadriga.models.memory import EngineMemory
    from quadriga.rollout.base import RolloutEngine
    from quadriga.rollout.memory import GenerationUse

ROLLOUT_KEY = "actor_rollout_ref.rollout"
"""The section of the rollout in the settings, for messages."""


def refuse_untested(problem: str, engine: str, *, accepted: bool) -> None:
    """Raise `ConfigError` for an engine in another version than the tested one, or warn.

    Args:
        problem: which version was found, and which one is tested.
        accepted: the option `untested_version` of the engine: warn.
    """
    key = f"{ROLLOUT_KEY}.options.untested_version"
    if not accepted:
        text = f"{problem}; run make engines ENGINES={engine}, or accept it with {key}=true"
        raise ConfigError(text, key=key)
    logging.getLogger(__name__).warning("%s; weights and sampling may fail", problem)


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
        continues: it can pause a response and continue it later, under new weights too.
        in_flight: its weights may be received while it generates (`rollout.update`), and its caches
            kept when they change (`rollout.reset_caches`).
        file_names: its weights have the names and shapes of the model's files, not transformers'.
        reports_routes: it can say which experts compute each token (`rollout.replay_routes`).
    """

    engine: ClassVar[str] = ""
    computes_images: ClassVar[bool] = False
    continues: ClassVar[bool] = False
    in_flight: ClassVar[bool] = False
    file_names: ClassVar[bool] = False
    reports_routes: ClassVar[bool] = False
    sampling_settings: ClassVar[frozenset[SamplingSetting]] = ALL_SETTINGS

    def __init__(self, settings: RolloutEngineConfig) -> None:
        self.settings = settings

    def abilities(self, vocabulary: int, window: int | None) -> RolloutAbilities:
        """Return what the engine can do with a model of this vocabulary and context window."""
        return RolloutAbilities(
            vocabulary,
            window,
            settings=self.sampling_settings,
            continues=self.continues,
            file_names=self.file_names,
        )

    @property
    def records_routes(self) -> bool:
        """The engine is to say which experts compute each token."""
        return isinstance(self.settings, RolloutConfig) and self.settings.replay_routes

    @property
    def resets_caches(self) -> bool:
        """A weight update frees the keys and values of responses that go on."""
        return not isinstance(self.settings, RolloutConfig) or self.settings.reset_caches

    @property
    def ranks_of_copy(self) -> int:
        """How many ranks hold one copy of the weights, and generate the same rows."""
        return 1

    def check(self, ranks: int | None) -> None:
        """Raise `ConfigError` if the engine is not installed, or an option does not fit.

        Args:
            ranks: how many ranks the rollout has, if that is known.
        """
        key, given = f"{ROLLOUT_KEY}.options", sorted(self.settings.options)
        if given:
            problem = f"rollout engine {self.settings.name!r} has no options {given}"
            raise ConfigError(f"{problem}; remove them from {key}", key=key)

    def check_updates(self, ranks: int | None, *, take_turns: bool) -> None:
        """Raise `ConfigError` if a training run cannot update the weights of the engine.

        Args:
            take_turns: its memory is released while the actor trains.
        """

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Raise `RolloutAbilityError` if the engine cannot sample with these settings."""
        params = SamplingParams.of(sampling, max(1, sampling.min_new_tokens))
        self.abilities(1, None).check(params, self.settings.name)

    def check_model(self, model: ModelConfig, device_type: str | None) -> None:
        """Raise `ModelError` if the engine cannot compute the model, or receive its weights.

        Args:
            device_type: of the ranks, if that is known.
        """
        if self.file_names:
            from quadriga.models.loading import model_without_weights
            from quadriga.models.weights import file_parts

            file_parts(model_without_weights(model))

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
