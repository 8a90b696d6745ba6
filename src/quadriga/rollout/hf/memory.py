"""The memory of the engine `hf` on one rank, counted on the meta device.

Generation is simulated at its two largest moments: the prefill of the distinct prompts, and the
last token, when no row has ended.
"""

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quadriga.config.schema import ModelConfig, RolloutEngineConfig
from quadriga.models import memory
from quadriga.rollout.base import SamplingParams
from quadriga.rollout.hf.generation import CachedModel, draw
from quadriga.rollout.hf.kv_cache import (
    PromptRows,
    RepeatedPrompts,
    SharedPrompts,
    cache_tensors,
    columns_at_end,
    columns_before,
)
from quadriga.rollout.memory import GenerationUse, rollout_on_meta


def generation_memory(
    rollout: RolloutEngineConfig, model: ModelConfig, use: GenerationUse
) -> memory.EngineMemory:
    """Return the weights, and the cache and buffers of the rows that are generated at once.

    Raises:
        ModelError: the folder has no config of a causal language model.
    """
    module = rollout_on_meta(rollout, model, use.device_type)
    weights, adds, missing = memory.stored_bytes(module.state_dict().values()), {}, ""
    with torch.no_grad(), memory.kernels_of(use.device_type):
        found = memory.counted(lambda: _simulate(module, use))
    if isinstance(found, str):
        missing = f"KV cache and buffers ({found})"
    else:
        kept = found[0] * use.kept // use.count
        adds = {"KV cache": found[0] + kept, "buffers": found[1] - found[0]}
    return memory.EngineMemory(
        {"weights": weights}, {"generate": adds}, host=weights, loading=weights, missing=missing,
        shares_weights=True,
    )  # fmt: skip


def _simulate(module: PreTrainedModel, use: GenerationUse) -> tuple[int, int]:
    """Return (bytes of the cache at the end, most bytes beside the weights)."""
    model, counter = CachedModel(module, memory.META), memory.AllocationCounter()
    sampling = SamplingParams.of(replace(use.sampling, min_new_tokens=0), use.response)
    with memory.META, counter:
        # Token ids, log-probabilities, and the uniform numbers that sampling needs.
        outputs = torch.empty(use.count, use.response, 20, dtype=torch.uint8)
        numbers = torch.empty(use.count, dtype=torch.float64)
        places = torch.empty(use.count, dtype=torch.int64)
        cache = model.new_cache()
        ids = torch.zeros(use.prompts, use.prompt, dtype=torch.int64)
        logits = model.forward(cache.cache, ids, ids.cumsum(1))
        of_row = torch.empty(use.count, dtype=torch.int64)
        _begin_rows(cache, use, of_row, module.dtype)
        logits = logits.index_select(0, of_row)
        # Prompts of different lengths need a mask, for which no number is known here: one for the
        # model and one in the dtype of the scores.
        masks = use.prompts * use.prompt**2 * (1 + module.dtype.itemsize)
        prefill = counter.peak + masks

        def run(token: Tensor) -> Tensor:
            positions = torch.zeros_like(token)[:, None]
            others = cache.arguments(torch.ones_like(token, dtype=torch.bool)[:, None])
            return model.forward(cache.cache, token[:, None], positions, others)

        logits = run(draw(logits, sampling, numbers, places)[0])
        copied, held = _fill(cache, use), memory.stored_bytes(list(cache_tensors(cache.cache)))
        counter.peak = 0
        token = draw(logits, sampling, numbers, places)[0]
        sampled, counter.peak = counter.peak, 0
        run(token)
        del outputs
    return held, max(prefill, sampled, counter.peak + copied)


def _begin_rows(
    cache: SharedPrompts | RepeatedPrompts, use: GenerationUse, of_row: Tensor, dtype: torch.dtype
) -> None:
    """Let the rows continue their prompts."""
    if isinstance(cache, SharedPrompts):
        slots = of_row.new_empty(use.prompts * -(-use.count // use.prompts))
        bias = torch.zeros(use.prompts, 1, use.prompt, dtype=dtype)
        cache.share(PromptRows(use.prompts, of_row, slots, of_row, bias))
    else:
        visible = torch.ones(use.prompts, use.prompt, dtype=torch.bool)
        cache.begin_rows(of_row, visible)


def _fill(cache: SharedPrompts | RepeatedPrompts, use: GenerationUse) -> int:
    """Extend the cache to the last token but one; return the bytes of the old buffer while the last
    one that grows is copied."""
    copied = 0
    for layer in cache.growing:
        first, tokens = layer.keys.shape[2], layer.length + use.response - 2
        columns = columns_at_end(first, tokens)
        for name in ("keys", "values"):
            b, heads, _, size = getattr(layer, name).shape
            dtype = getattr(layer, name).dtype
            setattr(layer, name, None)  # so that it does not exist beside the new one
            setattr(layer, name, torch.empty(b, heads, columns, size, dtype=dtype))
        layer.length = max(tokens - 1, 0)
        if columns > first:
            copied = max(copied, layer.keys.nbytes * columns_before(columns) // columns)
    if isinstance(cache, RepeatedPrompts):
        columns = use.prompt + max(use.response - 2, 0)
        cache.visible = torch.ones(use.count, columns, dtype=torch.bool)
    return copied
