"""The memory that vLLM reserves when it starts, from its options."""

from __future__ import annotations

import math

from quadriga.config.schema import ModelConfig, RolloutEngineConfig
from quadriga.models.memory import EngineMemory, stored_bytes
from quadriga.rollout.memory import CONTEXT_BYTES, GenerationUse, rest_of_share, rollout_on_meta
from quadriga.rollout.vllm.options import CPU_CACHE_MB, VLLM


def vllm_memory(
    rollout: RolloutEngineConfig, model: ModelConfig, use: GenerationUse
) -> EngineMemory:
    """Return weights, and keys and values: a given size, or the rest of a share of the device."""
    options, on_cpu = VLLM(rollout).options, use.device_type == "cpu"
    module = rollout_on_meta(model, rollout.dtype, use.device_type)
    size = stored_bytes(module.state_dict().values())
    weights = math.ceil(size / options.tensor_parallel_size)
    cache_mb = options.kv_cache_mb or (CPU_CACHE_MB if on_cpu else None)
    limit: tuple[str, float]
    if cache_mb is not None:
        cache, limit = cache_mb << 20, ("options.kv_cache_mb", cache_mb)
        missing = "activations of vLLM" if on_cpu else "activations and CUDA graphs of vLLM"
    else:
        share = options.gpu_memory_utilization
        # The context is counted with the process of the rank.
        cache = rest_of_share(share, use.device, weights + CONTEXT_BYTES)
        limit = ("options.gpu_memory_utilization", share)
        known = use.device is not None
        missing = "" if known else f"keys and values of vLLM, {share:g} of the device"
    held = {"weights": weights, "KV cache": cache}
    host = weights if options.sleep_level == 1 else 0
    return EngineMemory(held, {"generate": {}}, host, missing=missing, limit=limit)
