"""How a run uses a rollout engine, and the memory of an engine that reserves it when it starts.

`Rollout.memory(model, use)` of each engine returns its `EngineMemory`. vLLM and SGLang allocate
their keys and values once, and keep them while the actor trains, unless `rollout.take_turns`
releases them. On an accelerator they take a share of the device:

    engine   share of the device                 weights   keys and values   activations   context
    vllm     gpu_memory_utilization              in it     the rest of it    in it         in it
    sglang   server_args.mem_fraction_static     in it     the rest of it    beside it     beside it
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quadriga.config.schema import ModelConfig, RolloutEngineConfig, SamplingConfig
from quadriga.models.loading import model_without_weights
from quadriga.models.memory import META, EngineMemory, stored_bytes
from quadriga.parallel.device import compute_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONTEXT_BYTES = 2**30
"""What a process takes of an accelerator, apart from tensors: its context and its kernels."""


@dataclass(frozen=True)
class GenerationUse:
    """The rows that one rank generates at once, all of full length.

    Attributes:
        count: rows.
        prompts: distinct prompts among them.
        prompt, response: tokens of each row.
        device_type: "cpu", or the type of an accelerator.
        device: bytes of the accelerator of a rank. None: they are not known.
        kept: further rows that are paused, whose caches may be kept.
    """

    count: int
    prompts: int
    prompt: int
    response: int
    sampling: SamplingConfig
    device_type: str
    device: int | None = None
    kept: int = 0


def rollout_on_meta(
    rollout: RolloutEngineConfig, model: ModelConfig, device_type: str
) -> PreTrainedModel:
    """Return the model of a rollout without weights."""
    device = torch.device("cpu") if device_type == "cpu" else META
    return model_without_weights(model, dtype=compute_dtype(rollout.dtype, device))


def reserved_memory(
    rollout: RolloutEngineConfig,
    model: ModelConfig,
    use: GenerationUse,
    limit: tuple[str, float],
    *,
    ranks: int,
    in_mib: bool = False,
    processes: int = 0,
) -> EngineMemory:
    """Return the weights, and the keys and values that an engine reserves.

    Args:
        limit: the option that says how many keys and values, and its value: a share of the device,
            which holds the weights too, or their size `in_mib`.
        ranks: devices over which the model is split.
        processes: of the engine that use the device, beside the rank. 0: it is in the process of
            the rank, and its context and activations are in its share.
    """
    (setting, value), on_cpu, cache = limit, use.device_type == "cpu", 0
    module = rollout_on_meta(rollout, model, use.device_type)
    weights = math.ceil(stored_bytes(module.state_dict().values()) / ranks)
    missing = f"activations{'' if on_cpu else ' and CUDA graphs'} of {rollout.name}"
    if in_mib:
        cache = int(value) << 20
    elif on_cpu or use.device is None:
        missing = f"keys and values of {rollout.name}"
    else:
        context = 0 if processes else CONTEXT_BYTES
        cache = max(0, math.ceil(value * use.device) - weights - context)
        missing = missing if processes else ""
    return EngineMemory(
        {"weights": weights, "KV cache": cache}, {"generate": {}}, weights, missing=missing,
        processes=processes, limit=(f"options.{setting}", value),
    )  # fmt: skip
