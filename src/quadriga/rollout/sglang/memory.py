"""The memory that SGLang reserves when it starts, from its options."""

from __future__ import annotations

import math

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
    ranks, cache = options.tensor_parallel, None
    weights = math.ceil(stored_bytes(module.state_dict().values()) / ranks)
    name, default = ("max_total_tokens", CPU_TOKENS) if on_cpu else (
        "mem_fraction_static", MEM_FRACTION_STATIC
    )  # fmt: skip
    given = options.server_args.get(name, default)
    number = given if isinstance(given, int | float) else None
    config = module.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    layers = getattr(config, "num_hidden_layers", None)
    if on_cpu and number is not None and heads and layers:
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        of_token = 2 * layers * kv_heads * size * module.dtype.itemsize
        cache = math.ceil(of_token * number / ranks)
    elif not on_cpu and number is not None and use.device is not None:
        cache = rest_of_share(number, use.device, weights)
    missing = f"activations{'' if on_cpu else ' and CUDA graphs'} of SGLang"
    if cache is None:
        missing = f"keys, values and {missing}"
    if ranks > 1 and not on_cpu:
        missing += f", and its part on {ranks - 1} further devices"
    return EngineMemory(
        {"weights": weights, "KV cache": cache or 0},
        {"generate": {}},
        weights,
        missing=missing,
        processes=3 if on_cpu else 1,  # its host, scheduler and detokenizer, or its scheduler
        limit=None if number is None else (f"options.server_args.{name}", number),
    )
