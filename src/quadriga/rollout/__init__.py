"""Rollout engines: they sample responses to prompts.

- `base`: the `RolloutEngine` protocol, its output, and the digest of a weight.
- `params`: how tokens are sampled. `abilities`: what an engine can do of it.
- `requests`: checks of a request; `output_checks`: of an output; `guard`: both, around any engine.
- `hf`: generation in this process with a Hugging Face model. It uses `sampling`.
- `vllm`: generation in this process with vLLM, from an environment of its own.
- `sglang`: generation in processes below this one, or by a server, with SGLang.
- `stop_strings`: which token completes a stop string. `responses`: lists of tokens as one output.
- `memory`: the device memory of generation by `hf`, known before a weight is loaded; `reserved`: of
  vLLM and SGLang.

May import every package below `rollout` in docs/architecture.md, but not `engines`. Importing this
file imports no torch.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quadriga.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    import torch

    from quadriga.config.schema import (
        DtypeName,
        LoraConfig,
        ModelConfig,
        Options,
        RolloutConfig,
        SamplingConfig,
    )
    from quadriga.models.context_window import LongestSequence
    from quadriga.rollout.base import RolloutEngine


class RolloutFactory(Protocol):
    """Builds one kind of rollout engine. See `build_rollout` for the arguments."""

    def __call__(
        self,
        model: ModelConfig,
        *,
        device: str | torch.device,
        dtype: DtypeName,
        micro_batch_size: int,
        releasable: bool,
        **options: object,
    ) -> RolloutEngine: ...


@dataclass(frozen=True)
class EngineClass:
    """The factory of an engine whose module is imported when the first engine is built.

    Attributes:
        module: name of the module.
        name: of the class in it.
    """

    module: str
    name: str

    def __call__(
        self,
        model: ModelConfig,
        *,
        device: str | torch.device,
        dtype: DtypeName,
        micro_batch_size: int,
        releasable: bool,
        **options: object,
    ) -> RolloutEngine:
        build: RolloutFactory = getattr(importlib.import_module(self.module), self.name)
        return build(
            model,
            device=device,
            dtype=dtype,
            micro_batch_size=micro_batch_size,
            releasable=releasable,
            **options,
        )


ROLLOUTS: dict[str, RolloutFactory] = {
    "hf": EngineClass("quadriga.rollout.hf", "HFRollout"),
    "vllm": EngineClass("quadriga.rollout.vllm.engine", "VLLMRollout"),
    "sglang": EngineClass("quadriga.rollout.sglang.engine", "SGLangRollout"),
}
"""Name -> function that builds the engine."""


def ranks_of_copy(name: str, options: Options) -> int:
    """Return how many ranks hold one copy of the rollout's weights, and generate the same rows."""
    if name != "vllm":
        return 1
    from quadriga.rollout.vllm.options import parse_options

    return parse_options(options).tensor_parallel_size


def check_rollout(name: str, options: Options, ranks: int | None = None) -> None:
    """Check, before a worker starts, an engine and its options (`rollout.options`).

    Args:
        ranks: how many ranks the rollout has, if that is known.

    Raises:
        ConfigError: the engine is not installed, or an option is not one of the engine's or out of
            range.
    """
    if name == "vllm":
        from quadriga.rollout.vllm.options import check_installed, check_ranks, parse_options

        check_installed(parse_options(options))
        if ranks is not None:
            check_ranks(parse_options(options), ranks)
    if name == "sglang":
        from quadriga.rollout.sglang.options import check_sglang

        check_sglang(options)
    if name == "hf" and options:
        key = "actor_rollout_ref.rollout.options"
        raise ConfigError(
            f"rollout engine 'hf' has no options {sorted(options)}; remove them from {key}", key=key
        )


def check_sampling(name: str, options: Options, sampling: SamplingConfig) -> None:
    """Check, before a worker starts, that an engine can sample with these settings.

    Raises:
        RolloutAbilityError: it cannot.
    """
    if name == "vllm":
        from quadriga.rollout.vllm.options import check_temperature

        check_temperature(sampling.temperature)
    if name != "sglang":  # the other engines apply every setting
        return
    from quadriga.rollout.params import SamplingParams
    from quadriga.rollout.sglang.declared import declared_abilities
    from quadriga.rollout.sglang.options import sglang_options

    abilities = declared_abilities(sglang_options(options), 1, None, exposes_weights=False)
    settings = SamplingParams(
        max_new_tokens=max(1, sampling.min_new_tokens),
        eos_token_ids=(0,),
        pad_token_id=0,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        min_new_tokens=sampling.min_new_tokens,
    )
    abilities.check(settings, name)


def check_window(name: str, options: Options, model: ModelConfig, longest: LongestSequence) -> None:
    """Check, before a worker starts, that an engine computes the longest sequence.

    The window of the model is compared by `check_context_window`; here it is the one of the
    engine's own options. hf and SGLang have that of the model.

    Raises:
        ConfigError: the sequence does not fit, or the options do not fit the model.
        ModelError: the folder is not a model folder.
    """
    if name != "vllm":
        return
    from quadriga.models.context_window import window_of
    from quadriga.rollout.vllm.options import engine_window, parse_options

    found = window_of(model.path, trust_remote_code=model.trust_remote_code)
    window = engine_window(parse_options(options), model.path, found)
    over = longest.tokens - window
    if over > 0:
        key = "actor_rollout_ref.rollout.options.max_model_len"
        raise ConfigError(
            f"{longest.arithmetic}, but {key}={window}; raise it, or {longest.remedy} by {over}",
            key=key,
        )


def not_reproduced(name: str, options: Options, sampling: SamplingConfig) -> str:
    """Return why an engine cannot generate the same responses again, "" if it can in float32."""
    if name != "sglang":
        return ""
    from quadriga.rollout.sglang.options import sglang_options

    if sampling.temperature > 0 and not sglang_options(options).seeds:
        return (
            "SGLang draws other random numbers in each run; with rollout.options.seeds=true each "
            "response has a seed"
        )
    return (
        "the rounding of SGLang depends on the rows that it computes together, so a token can "
        "change where two tokens have nearly equal probabilities"
    )


def loads_adapters(rollout: RolloutConfig, lora: LoraConfig) -> bool:
    """Return whether the rollout engine computes with the adapters of the actor beside its weights.

    Otherwise it receives weights into which they are merged.
    """
    if rollout.name != "vllm" or not lora.enabled or rollout.load_adapters is False:
        return False
    from quadriga.rollout.vllm.options import can_load_adapters

    return can_load_adapters(rollout.options, lora)


_WITHOUT_ADAPTERS = {
    "sglang": " (SGLang 0.5.23 does not start with adapters on a machine without a GPU, so sending "
    "them to it was never tested)",
}
"""Why an engine that could hold adapters is not given any."""


def check_adapters(rollout: RolloutConfig, lora: LoraConfig) -> None:
    """Check, before a worker starts, that `load_adapters` can be done if it is set.

    Raises:
        ConfigError: the model has no adapters, or the engine cannot load them.
    """
    key = "actor_rollout_ref.rollout.load_adapters"
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
            f"512 or less, got name={rollout.name}{_WITHOUT_ADAPTERS.get(rollout.name, '')}; set "
            "it to null, and the adapters are merged into the weights that the engine receives",
            key=key,
        )


def check_updates(
    name: str, options: Options, ranks: int | None = None, *, take_turns: bool = False
) -> None:
    """Check, before a worker starts, that a training run can update the weights of an engine.

    Args:
        ranks: how many ranks the rollout has, if that is known.
        take_turns: whether its memory is released while the actor trains.

    Raises:
        ConfigError: it cannot.
    """
    if name == "vllm":
        from quadriga.rollout.vllm.options import check_sleep, parse_options

        check_sleep(parse_options(options), take_turns=take_turns)
    if name == "sglang":
        from quadriga.rollout.sglang.options import check_sglang_updates

        check_sglang_updates(options, ranks, take_turns=take_turns)


def build_rollout(
    name: str,
    model: ModelConfig,
    *,
    device: str | torch.device = "cpu",
    dtype: DtypeName = "auto",
    micro_batch_size: int = 256,
    releasable: bool = True,
    **options: object,
) -> RolloutEngine:
    """Build the rollout engine `name`.

    Args:
        device: the device of this rank, or its type ("cuda").
        dtype: dtype of weights and computation; "auto" is float32 on a CPU and bfloat16 elsewhere.
        micro_batch_size: rows that are generated at once.
        releasable: whether `release` will be called. vLLM and SGLang allocate differently for it
            on a GPU; without it they refuse `release` there.
        options: the engine's own options (setting `rollout.options`).

    Raises:
        UnknownNameError: there is no engine of that name.
        ConfigError: the engine is not installed.
        ModelError: the folder does not hold a causal language model, or an option is unknown.
    """
    if name not in ROLLOUTS:
        nearest = next(iter(difflib.get_close_matches(name, ROLLOUTS, n=1)), None)
        hint = f"; did you mean {nearest!r}?" if nearest else ""
        raise UnknownNameError(
            f"there is no rollout engine {name!r}; known: {', '.join(ROLLOUTS)}{hint}",
            name=name,
            known=list(ROLLOUTS),
            nearest=nearest,
        )
    return ROLLOUTS[name](
        model,
        device=device,
        dtype=dtype,
        micro_batch_size=micro_batch_size,
        releasable=releasable,
        **options,
    )
