"""The memory of the engine `hf` on one rank, counted on the meta device.

Generation is simulated at its two largest moments: the prefill of the distinct prompts, and the
last token, when no row has ended.

Shapes: b rows, P prompt columns, R response columns, V vocabulary entries.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quadriga.config.schema import ModelConfig, RolloutEngineConfig
from quadriga.errors import QuadrigaError
from quadriga.models.memory import (
    META,
    AllocationCounter,
    EngineMemory,
    failure,
    kernels_of,
    stored_bytes,
)
from quadriga.rollout.base import SamplingParams
from quadriga.rollout.hf.generation import CachedModel
from quadriga.rollout.hf.kv_cache import (
    PromptRows,
    RepeatedPrompts,
    SharedPrompts,
    columns_at_end,
    columns_before,
)
from quadriga.rollout.hf.sampling import draw
from quadriga.rollout.memory import GeneratedRows, GenerationUse, rollout_on_meta


def generation_memory(
    rollout: RolloutEngineConfig, model: ModelConfig, use: GenerationUse
) -> EngineMemory:
    """Return the weights, and the cache and buffers of the rows that are generated at once.

    Raises:
        ModelError: the folder has no config of a causal language model.
    """
    module = rollout_on_meta(model, rollout.dtype, use.device_type)
    weights = stored_bytes(module.state_dict().values())
    found = EngineMemory({"weights": weights}, {}, host=weights, loading=weights)
    try:
        with torch.no_grad(), kernels_of(use.device_type):
            cache, peak = _simulate(module, use.rows, use.sampling)
    except QuadrigaError:
        raise
    except Exception as error:  # a model whose code reads numbers fails in any way; reported
        missing = f"KV cache and buffers ({failure(error)})"
        return replace(found, adds={"generate": {}}, missing=missing)
    return replace(found, adds={"generate": {"KV cache": cache, "buffers": peak - cache}})


def _simulate(
    module: PreTrainedModel, rows: GeneratedRows, sampling: SamplingParams
) -> tuple[int, int]:
    """Return (bytes of the cache at the end, most bytes beside the weights)."""
    counter = AllocationCounter()
    with counter:
        generation = _SimulatedGeneration(CachedModel(module, META), rows)
        generation.prefill()
        # Prompts of different lengths need a mask, for which no number is known here: one for the
        # model and one in the dtype of the scores.
        masks = rows.prompts * rows.prompt**2 * (1 + module.dtype.itemsize)
        prefill = counter.peak + masks
        generation.run(generation.sample(sampling))
        kv_cache, counter.peak = generation.fill(), 0
        token = generation.sample(sampling)
        sampled, counter.peak = counter.peak, 0
        generation.run(token)
        run = counter.peak + generation.copied
    return kv_cache, max(prefill, sampled, run)


class _SimulatedGeneration:
    """A generation on the meta device, as `rollout.hf` makes it."""

    def __init__(self, model: CachedModel, rows: GeneratedRows) -> None:
        self.model = model
        self.rows = rows
        self.cache = model.new_cache()
        # Token ids, log-probabilities, and the uniform numbers that sampling needs.
        self.outputs = torch.empty(rows.count, rows.response, 20, dtype=torch.uint8, device=META)
        self.copied = 0
        """Bytes of the old buffer while the last one that grows is copied."""

    def prefill(self) -> None:
        """Run the distinct prompts, which the rows continue."""
        count, width = self.rows.prompts, self.rows.prompt
        ids = torch.zeros(count, width, dtype=torch.int64, device=META)
        logits = self.model.forward(self.cache.cache, ids, ids.cumsum(1))
        of_row = torch.empty(self.rows.count, dtype=torch.int64, device=META)
        self._begin_rows(of_row, torch.ones_like(ids, dtype=torch.bool))
        self.logits = logits.index_select(0, of_row)

    def _begin_rows(self, of_row: Tensor, visible: Tensor) -> None:
        if isinstance(self.cache, SharedPrompts):
            count, prompts = self.rows.count, self.rows.prompts
            slots = of_row.new_empty(prompts * -(-count // prompts))
            bias = torch.zeros(visible.shape, dtype=self.model.module.dtype, device=META)[:, None]
            self.cache.share(PromptRows(prompts, of_row, slots, of_row, bias))
        else:
            self.cache.begin_rows(of_row, visible, self.rows.response)

    def fill(self) -> int:
        """Extend the cache to the last token but one; return the bytes that it has at the end."""
        for layer in self.cache.growing:
            first, tokens = layer.keys.shape[2], layer.length + self.rows.response - 2
            columns = columns_at_end(first, tokens)
            for name in ("keys", "values"):
                b, heads, _, size = getattr(layer, name).shape
                setattr(layer, name, None)  # so that it does not exist beside the new one
                setattr(layer, name, self.logits.new_empty(b, heads, columns, size))
            layer.length = max(tokens - 1, 0)
            if columns > first:
                bytes_before = layer.keys.nbytes * columns_before(columns) // columns
                self.copied = max(self.copied, bytes_before)
        if isinstance(self.cache, RepeatedPrompts):
            self.cache.columns = self.rows.prompt + max(self.rows.response - 2, 0)
        return stored_bytes(list(self.cache.tensors()))

    def sample(self, sampling: SamplingParams) -> Tensor:
        """Sample one token for each row."""
        numbers = torch.empty(self.rows.count, dtype=torch.float64, device=META)
        return draw(self.logits, sampling, numbers, 0)[0]

    def run(self, token: Tensor) -> None:
        """Run the model on the newest token of each row."""
        positions = torch.zeros_like(token)[:, None]
        self.logits = self.model.forward(
            self.cache.cache, token[:, None], positions, self.cache.arguments()
        )
