"""The device memory that vLLM and SGLang reserve when they start, from their options.

Both allocate their keys and values once, and keep them while the actor trains, unless
`rollout.take_turns` releases them. On an accelerator they take a share of the device:

    engine   share of the device                 weights   keys and values   activations   context
    vllm     gpu_memory_utilization              in it     the rest of it    in it         in it
    sglang   server_args.mem_fraction_static     in it     the rest of it    beside it     beside it
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from quadriga.config.schema import ModelConfig, RolloutEngineConfig
from quadriga.models.loading import model_without_weights
from quadriga.parallel.device import compute_dtype
from quadriga.rollout.memory import GenerationMemory, stored_bytes
from quadriga.rollout.sglang.options import CPU_TOKENS, MEM_FRACTION_STATIC, SGLang
from quadriga.rollout.vllm.options import CPU_CACHE_MB, VLLM

CONTEXT_BYTES = 2**30
"""What a process takes of an accelerator, apart from tensors: its context and its kernels."""
RESERVING = ("vllm", "sglang")
"""The engines that `reserved_memory` knows."""


def reserved_memory(
    rollout: RolloutEngineConfig,
    model: ModelConfig,
    *,
    device_type: str,
    device: int | None,
    releasable: bool,
) -> GenerationMemory:
    """Return the memory of an engine of `RESERVING` on one rank.

    Args:
        device: bytes of the device of a rank. None: they are not known.
        releasable: whether it is released while the actor trains (`rollout.take_turns`).

    Raises:
        ConfigError: an option is unknown or out of range.
        ModelError: the folder has no config of a causal language model.
    """
    auto = torch.device("cpu" if device_type == "cpu" else "meta")
    dtype = compute_dtype(rollout.dtype, auto)
    module = model_without_weights(
        model.path, value_head=False, dtype=dtype, trust_remote_code=model.trust_remote_code
    )
    weights, on_cpu = stored_bytes(list(module.state_dict().values())), device_type == "cpu"
    known = None if on_cpu else device
    if rollout.name == "vllm":
        found = _vllm(rollout, weights, known, on_cpu=on_cpu)
    else:
        tokens = _bytes_of_token(module.config.get_text_config(), dtype)
        found = _sglang(rollout, weights, tokens, known, on_cpu=on_cpu)
    return replace(
        found,
        loaded=found.weights if on_cpu else 0,
        backup=found.backup if releasable else 0,
    )


def _vllm(
    rollout: RolloutEngineConfig, model: int, device: int | None, *, on_cpu: bool
) -> GenerationMemory:
    options = VLLM(rollout).options
    weights = math.ceil(model / options.tensor_parallel_size)
    cache_mb = options.kv_cache_mb or (CPU_CACHE_MB if on_cpu else None)
    backup = weights if options.sleep_level == 1 else 0
    if cache_mb is not None:
        beside = "activations" if on_cpu else "activations and CUDA graphs"
        cache, missing = cache_mb << 20, f"{beside} of vLLM"
        setting = f"options.kv_cache_mb={cache_mb}"
    else:
        share = options.gpu_memory_utilization
        # The context is counted with the process of the rank (`trainer.memory`).
        cache, missing = _rest(share, device, weights + CONTEXT_BYTES), ""
        setting = f"options.gpu_memory_utilization={share:g}"
        if device is None:
            missing = f"keys and values of vLLM, {share:g} of the device less the weights"
    return _reserved(weights, cache, missing, setting, backup=backup)


def _sglang(
    rollout: RolloutEngineConfig,
    model: int,
    of_token: int | None,
    device: int | None,
    *,
    on_cpu: bool,
) -> GenerationMemory:
    options = SGLang(rollout).options
    if options.url is not None:
        return _reserved(0, 0, f"the SGLang at {options.url}", "", backup=0)
    weights = math.ceil(model / options.tensor_parallel)
    if on_cpu:
        tokens = options.server_args.get("max_total_tokens", CPU_TOKENS)
        counted = of_token is not None and isinstance(tokens, int)
        cache = math.ceil((of_token or 0) * tokens / options.tensor_parallel) if counted else 0
        missing = "activations of SGLang" if counted else "keys, values and activations of SGLang"
        setting = f"options.server_args.max_total_tokens={tokens}"
        # Its host, its scheduler and its detokenizer.
        return _reserved(weights, cache, missing, setting, backup=weights, processes=3)
    share = options.server_args.get("mem_fraction_static", MEM_FRACTION_STATIC)
    counted = device is not None and isinstance(share, float) and 0 < share < 1
    cache = _rest(share, device, weights) if counted else 0
    missing = "activations and CUDA graphs of SGLang"
    if not counted:
        missing = f"keys, values and {missing}"
    if options.tensor_parallel > 1:
        missing += f", and its part on {options.tensor_parallel - 1} further devices"
    setting = f"options.server_args.mem_fraction_static={share}"
    # Only the scheduler uses the device.
    return _reserved(weights, cache, missing, setting, backup=weights, processes=1)


def _rest(share: float, device: int | None, used: int) -> int:
    """Return what a share of the device leaves for keys and values."""
    return 0 if device is None else max(0, math.ceil(share * device) - used)


def _reserved(
    weights: int, cache: int, missing: str, setting: str, *, backup: int, processes: int = 0
) -> GenerationMemory:
    return GenerationMemory(
        weights=weights,
        kv_cache=cache,
        peak=cache,
        reserved=cache,
        loaded=0,
        backup=backup,
        processes=processes,
        missing=missing,
        setting=setting,
    )


def _bytes_of_token(config: PreTrainedConfig, dtype: torch.dtype) -> int | None:
    """Return the bytes of a token's keys and values in all layers; None: the config has no such
    numbers."""
    layers = getattr(config, "num_hidden_layers", None)
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if not layers or not heads or not kv_heads:
        return None
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * layers * kv_heads * size * dtype.itemsize)
