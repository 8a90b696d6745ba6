"""A key-value cache that holds each prompt once, however many rows continue it.

A layer has two parts: the prompts, which the prefill has written, and the tokens that each row has
generated. `decode_attention.py` attends to both.

Shapes: p distinct prompts of P columns, b rows, H heads, Hk key heads, D head size, t columns of
generated tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from quadriga.errors import RolloutError
from quadriga.rollout.hf.kv_cache import CacheBuffers, GrowingCacheLayer, RowRemoval

# Five rows with the prompts A A A B B. The queries of a prompt's rows are computed together, in as
# many slots as the prompt with most rows has:
#
#                     A         B
#   row of slot     0 1 2     3 4 ·       · holds row 0, and its result is not read
#   slot of row     0 1 2 3 4
#
# Rows 1 and 4 end, and row 3 takes the place of row 1 (`kv_cache.RowRemoval`). The rows 0 1 2 have
# the prompts A B A then:
#
#                     A         B
#   row of slot     0 2       1 ·
#   slot of row     0 2 1


@dataclass(frozen=True)
class PromptRows:
    """Which rows continue each prompt.

    Attributes:
        prompts: p.
        prompt_of_row: [b] int64.
        row_of_slot: [p × rows of the prompt with most rows] int64.
        slot_of_row: [b] int64.
        bias: [p, 1, P], a large negative number at padding. None: there is no padding.
    """

    prompts: int
    prompt_of_row: Tensor
    row_of_slot: Tensor
    slot_of_row: Tensor
    bias: Tensor | None

    @staticmethod
    def of(prompt_of_row: Tensor, prompts: int, bias: Tensor | None) -> PromptRows:
        """Return the slots of rows. `prompts` is p, of which each has a row."""
        order = torch.argsort(prompt_of_row, stable=True)
        counts = torch.bincount(prompt_of_row, minlength=prompts)
        slots = int(counts.max())
        starts = counts.cumsum(0) - counts
        rows = torch.arange(len(order), device=order.device)
        slot_of_row = torch.empty_like(order)
        of_sorted = prompt_of_row[order]
        slot_of_row[order] = of_sorted * slots + rows - starts[of_sorted]
        row_of_slot = order.new_zeros(prompts * slots)
        row_of_slot[slot_of_row] = rows
        return PromptRows(prompts, prompt_of_row, row_of_slot, slot_of_row, bias)


class PromptCacheLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # as a base class
    """Keys and values of one layer: `prompt` [p, Hk, P, D] and `own` [b, Hk, t, D]."""

    is_compileable = False
    is_sliding = False

    def __init__(self, buffers: CacheBuffers | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers has no annotations here
        buffers = buffers or CacheBuffers()
        self.prompt = GrowingCacheLayer(buffers=buffers, spare_columns=0)
        self.own = GrowingCacheLayer(buffers=buffers)
        self.prefilled = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the two parts are initialized when their first tokens come."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append columns to the prompts, or after the prefill to the tokens of the rows.

        Returns the columns of that part.
        """
        part = self.own if self.prefilled else self.prompt
        return part.update(key_states, value_states)

    def release(self) -> None:
        """Keep the buffers for the next cache."""
        self.prompt.release()
        self.own.release()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (columns of the mask for `query_length` new tokens, offset of the first)."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Return the columns that a query can see, those of its prompt included."""
        return self.prompt.length + self.own.length

    def get_max_length(self) -> int:
        """Return -1: the cache grows without limit."""
        return -1


class PromptCache(Cache):
    """A cache of `PromptCacheLayer`s. `buffers`: the memory of earlier caches."""

    def __init__(self, config: PreTrainedConfig, buffers: CacheBuffers | None = None) -> None:
        count = len(DynamicCache(config=config).layers)
        self.parts = [PromptCacheLayer(buffers) for _ in range(count)]
        super().__init__(layers=[*self.parts])
        self.attended: set[PromptCacheLayer] = set()
        """The layers whose rows have attended to their prompts."""
        self._newest: tuple[PromptCacheLayer, Tensor, Tensor] | None = None

    def begin_rows(self, rows: PromptRows) -> None:
        """Append to the rows from now on. The prefill has written the prompts."""
        self.rows = rows
        for layer in self.parts:
            layer.prefilled = True

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Append columns to a layer; see `PromptCacheLayer.update`."""
        layer = self.parts[layer_idx]
        keys, values = layer.update(key_states, value_states)
        self._newest = layer, keys, values
        return keys, values

    def layer_of(self, keys: Tensor, values: Tensor) -> PromptCacheLayer:
        """Return the layer whose `update` has just returned these very tensors, to attend to it.

        Raises:
            RolloutError: the model has changed them. Attention would need the same change of the
                prompt.
        """
        newest, self._newest = self._newest, None
        if newest is None or newest[1] is not keys or newest[2] is not values:
            raise RolloutError(
                "a layer attends to other keys and values than the cache returned; shared prompts "
                "need the cached ones",
                engine="hf",
                method="generate",
            )
        self.attended.add(newest[0])
        return newest[0]

    def remove_rows(self, removal: RowRemoval) -> None:
        """Remove rows, and the prompts that no row continues."""
        rows = self.rows
        used, prompt_of_row = torch.unique(rows.prompt_of_row[removal.order], return_inverse=True)
        bias = rows.bias
        if len(used) < rows.prompts:
            bias = None if bias is None else bias[used]
            for layer in self.parts:
                layer.prompt.reorder_cache(used)
        self.rows = PromptRows.of(prompt_of_row, len(used), bias)
        for layer in self.parts:
            layer.own.remove_rows(removal)

    def release(self) -> None:
        """Keep the buffers of all layers for the next cache."""
        for layer in self.parts:
            layer.release()
