"""How a run uses a rollout engine: what its memory depends on.

`Rollout.memory(model, use)` of each engine returns its `EngineMemory`. vLLM and SGLang
allocate their keys and values once, and keep them while the actor trains, unless
`rollout.take_turns` releases them. On an accelerator they take a share of the device:

    engine   share of the device                 weights   keys and values   activations   context
    vllm     gpu_memory_utilization              in it     the rest of it    in it         in it
    sglang   server_args.mem_fraction_static     in it     the rest of it    beside it     beside it
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quadriga.config.schema import DtypeName, ModelConfig, SamplingConfig
from quadriga.models.loading import model_without_weights
from quadriga.models.memory import META
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
    """

    count: int
    prompts: int
    prompt: int
    response: int
    sampling: SamplingConfig
    device_type: str
    device: int | None = None


def rollout_on_meta(model: ModelConfig, dtype: DtypeName, device_type: str) -> PreTrainedModel:
    """Return the model of a rollout without weights."""
    import torch

    return model_without_weights(
        model.path,
        value_head=False,
        dtype=compute_dtype(dtype, torch.device("cpu") if device_type == "cpu" else META),
        attn_implementation=model.attn_implementation,
        trust_remote_code=model.trust_remote_code,
    )


def rest_of_share(share: float, device: int | None, used: int) -> int:
    """Return what a share of the device leaves for keys and values."""
    return 0 if device is None else max(0, math.ceil(share * device) - used)
