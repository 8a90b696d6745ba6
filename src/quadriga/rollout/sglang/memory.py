"""The memory that SGLang reserves when it starts, from its options."""

from __future__ import annotations

import math

import torch
from transformers import PreTrainedConfig

from quadriga.config.schema import ModelConfig, RolloutEngineConfig
from quadriga.models.memory import EngineMemory, stored_bytes
from quadriga.rollout.memory import GenerationUse, rest_of_share, rollout_on_meta
from quadriga.rollout.sglang.options import CPU_TOKENS, MEM_FRACTION_STATIC, SGLang


def sglang_memory(
    rollout: RolloutEngineConfig, model: ModelConfig, use: GenerationUse
) -> EngineMemory:
    """Return weights, and keys and values: some tokens, or the rest of a share of the device."""
    options, on_cpu = SGLang(rollout).options, use.device_type == "cpu"
    if options.url is not None:
        return EngineMemory({}, {"generate": {}}, missing=f"the SGLang at {options.url}")
    module = rollout_on_meta(model, rollout.dtype, use.device_type)
    size, ranks = stored_bytes(module.state_dict().values()), options.tensor_parallel
    weights = math.ceil(size / ranks)
    limit: tuple[str, float] | None = None
    if on_cpu:
        of_token = _bytes_of_token(module.config.get_text_config(), module.dtype)
        tokens = options.server_args.get("max_total_tokens", CPU_TOKENS)
        counted = of_token is not None and isinstance(tokens, int)
        cache = math.ceil((of_token or 0) * tokens / ranks) if isinstance(tokens, int) else 0
        missing, processes = "activations of SGLang", 3  # its host, scheduler and detokenizer
        if isinstance(tokens, int):
            limit = ("options.server_args.max_total_tokens", tokens)
    else:
        share = options.server_args.get("mem_fraction_static", MEM_FRACTION_STATIC)
        counted = use.device is not None and isinstance(share, float) and 0 < share < 1
        cache = rest_of_share(share, use.device, weights) if isinstance(share, float) else 0
        missing, processes = "activations and CUDA graphs of SGLang", 1  # only its scheduler
        if isinstance(share, float):
            limit = ("options.server_args.mem_fraction_static", share)
    if not counted:
        missing = f"keys, values and {missing}"
    if ranks > 1 and not on_cpu:
        missing += f", and its part on {ranks - 1} further devices"
    held = {"weights": weights, "KV cache": cache}
    return EngineMemory(
        held, {"generate": {}}, weights, missing=missing, processes=processes, limit=limit
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
