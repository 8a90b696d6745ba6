"""The device memory of generation on one rank, counted on the meta device.

Generation is simulated at its two largest moments: the prefill of the distinct prompts, and the
last token, when no row has ended.

Shapes: b rows, P prompt columns, R response columns, V vocabulary entries.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from quadriga.config.schema import DtypeName, ModelConfig
from quadriga.errors import QuadrigaError
from quadriga.models.loading import model_without_weights
from quadriga.models.simulated.allocations import AllocationCounter
from quadriga.models.simulated.kernels import kernels_of
from quadriga.parallel.device import compute_dtype
from quadriga.rollout.base import SamplingParams
from quadriga.rollout.hf.generation import run_with_cache, takes_bias
from quadriga.rollout.hf.kv_cache import (
    GrowingCacheLayer,
    columns_at_end,
    columns_before,
    growing_cache,
    reorder_cache,
)
from quadriga.rollout.sampling import draw

META = torch.device("meta")


@dataclass(frozen=True)
class GeneratedRows:
    """The rows that one rank generates at once, all of full length.

    Attributes:
        count: rows.
        prompts: distinct prompts among them.
        prompt, response: tokens of each row.
    """

    count: int
    prompts: int
    prompt: int
    response: int


@dataclass(frozen=True)
class GenerationMemory:
    """Bytes of a rollout engine on one rank.

    Attributes:
        weights: the unsharded weights.
        kv_cache: keys, values and recurrent states at the end.
        peak: the most bytes beside the weights, the cache included.
        uncounted: why `kv_cache` and `peak` are 0 although there are some; "" if they are counted.
    """

    weights: int
    kv_cache: int
    peak: int
    uncounted: str = ""


def generation_memory(
    model: ModelConfig,
    rows: GeneratedRows,
    sampling: SamplingParams,
    *,
    dtype: DtypeName,
    device_type: str,
) -> GenerationMemory:
    """Return the memory of the engine `hf`.

    Raises:
        ModelError: the folder has no config of a causal language model.
    """
    auto = torch.device("cpu" if device_type == "cpu" else "meta")
    module = model_without_weights(
        model.path,
        value_head=False,
        dtype=compute_dtype(dtype, auto),
        attn_implementation=model.attn_implementation,
        trust_remote_code=model.trust_remote_code,
    )
    weights = _stored(list(module.state_dict().values()))
    try:
        with torch.no_grad(), kernels_of(device_type):
            kv_cache, peak = _simulate(module, rows, sampling)
    except QuadrigaError:
        raise
    except Exception as error:  # a model whose code reads numbers fails in any way; reported
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        return GenerationMemory(weights, 0, 0, uncounted=reason)
    return GenerationMemory(weights, kv_cache, peak)


def _simulate(
    module: PreTrainedModel, rows: GeneratedRows, sampling: SamplingParams
) -> tuple[int, int]:
    """Return (bytes of the cache at the end, most bytes beside the weights)."""
    counter = AllocationCounter()
    with counter:
        generation = _SimulatedGeneration(module, rows)
        generation.prefill()
        # Prompts of different lengths need a mask, for which no number is known here: one for the
        # model and one in the dtype of the scores.
        masks = rows.prompts * rows.prompt**2 * (1 + module.dtype.itemsize)
        prefill = counter.peak + masks
        kv_cache = generation.fill()
        token = generation.sample(sampling)
        sampled, counter.peak = counter.peak, 0
        generation.run(token)
        run = counter.peak + generation.copied()
    return kv_cache, max(prefill, sampled, run)


class _SimulatedGeneration:
    """A generation on the meta device, as `rollout.hf` makes it."""

    def __init__(self, module: PreTrainedModel, rows: GeneratedRows) -> None:
        self.module = module
        self.rows = rows
        self.parameters = set(inspect.signature(module.forward).parameters)
        self.cache: Cache = growing_cache(module.config)
        self.outputs = torch.empty(rows.count, rows.response, 2, dtype=torch.int64, device=META)

    @property
    def growing(self) -> list[GrowingCacheLayer]:
        """The layers whose buffers grow with each token."""
        return [layer for layer in self.cache.layers if isinstance(layer, GrowingCacheLayer)]

    def prefill(self) -> None:
        """Run the distinct prompts, then repeat their cache for every row."""
        count, width = self.rows.prompts, self.rows.prompt
        ids = torch.zeros(count, width, dtype=torch.int64, device=META)
        logits = run_with_cache(self.module, self.parameters, self.cache, ids, None, ids.cumsum(1))
        of_row = torch.empty(self.rows.count, dtype=torch.int64, device=META)
        reorder_cache(self.cache, of_row)
        self.logits = logits.index_select(0, of_row)

    def fill(self) -> int:
        """Extend the cache to the last token; return its bytes."""
        columns = columns_at_end(self.rows.prompt, self.rows.response - 1)
        for layer in self.growing:
            for name in ("keys", "values"):
                b, heads, _, size = getattr(layer, name).shape
                setattr(layer, name, None)  # so that it does not exist beside the new one
                setattr(layer, name, self.logits.new_empty(b, heads, columns, size))
            layer.length = self.rows.prompt + max(self.rows.response - 2, 0)
        tensors = [t for layer in self.cache.layers for t in vars(layer).values()]
        return _stored([t for t in tensors if isinstance(t, Tensor)])

    def copied(self) -> int:
        """Return the bytes of the old buffer while the last one that grows is copied."""
        columns = columns_at_end(self.rows.prompt, self.rows.response - 1)
        before = columns_before(columns)
        if before < columns_at_end(self.rows.prompt, 0) or not self.growing:
            return 0  # it has not grown since the prefill
        return max(layer.keys.nbytes for layer in self.growing) * before // columns

    def sample(self, sampling: SamplingParams) -> Tensor:
        """Sample one token for each row."""
        seeds = torch.empty(self.rows.count, dtype=torch.int64, device=META)
        return draw(self.logits, sampling, seeds, 0)[0]

    def run(self, token: Tensor) -> None:
        """Run the model on the last token of each row."""
        columns = self.rows.prompt + self.rows.response
        mask = torch.ones(self.rows.count, columns, dtype=torch.bool, device=META)
        if takes_bias(self.module, self.cache):
            mask = torch.zeros(mask.shape, dtype=self.logits.dtype, device=META)[:, None, None]
        seen = self.growing[0].length + 1 if self.growing else columns
        self.logits = run_with_cache(
            self.module, self.parameters, self.cache, token[:, None], mask[..., :seen],
            torch.zeros_like(token)[:, None],
        )  # fmt: skip


def _stored(tensors: list[Tensor]) -> int:
    """Return the bytes of the storages of these tensors."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({s._cdata: s.nbytes() for s in storages}.values())
