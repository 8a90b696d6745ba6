"""The caches of a generation: prompts that rows share, or prompts that are repeated for each row.

A model that can attend to shared prompts (`decode_attention.py`) uses the first, every other model
the second.

Shapes: b rows, p distinct prompts, P prompt columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from quadriga.rollout.hf.kv_cache import (
    CacheBuffers,
    GrowingCacheLayer,
    RowRemoval,
    growing_cache,
    release_cache,
    remove_rows,
    reorder_cache,
    sees_all_tokens,
)
from quadriga.rollout.hf.prompt_cache import PromptCache, PromptRows


class RowCache(Protocol):
    """The cache of one micro-batch."""

    @property
    def cache(self) -> Cache:
        """What the model takes. The prefill writes p distinct prompts to it."""
        ...

    def begin_rows(self, prompt_of_row: Tensor, visible: Tensor | None, new_tokens: int) -> None:
        """Continue the prompts by rows.

        Args:
            prompt_of_row: [b] int64, the prompt of each row.
            visible: [p, P] bool, False at padding. None: there is none.
            new_tokens: the most tokens that will be appended to a row.
        """
        ...

    def arguments(self) -> dict[str, object]:
        """Return the arguments of the model's next forward pass, on one new token of each row."""
        ...

    def remove_rows(self, removal: RowRemoval) -> None:
        """Remove rows that have ended."""
        ...

    def release(self) -> None:
        """Keep the buffers for the next micro-batch."""
        ...

    @property
    def growing(self) -> list[GrowingCacheLayer]:
        """The parts of the cache to which new tokens are appended."""
        ...

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor of the cache."""
        ...


class SharedPrompts:
    """The `RowCache` that holds every prompt once."""

    def __init__(self, module: PreTrainedModel, buffers: CacheBuffers) -> None:
        self.cache = PromptCache(module.config, buffers)
        self._dtype = module.dtype

    def begin_rows(self, prompt_of_row: Tensor, visible: Tensor | None, new_tokens: int) -> None:
        """See `RowCache`."""
        prompts = self.cache.parts[0].prompt.keys.shape[0]
        bias = None if visible is None else _bias(visible, self._dtype)[:, None]
        self.cache.begin_rows(PromptRows.of(prompt_of_row, prompts, bias))

    def arguments(self) -> dict[str, object]:
        """See `RowCache`."""
        return {"prompt_cache": self.cache}

    def remove_rows(self, removal: RowRemoval) -> None:
        """See `RowCache`."""
        self.cache.remove_rows(removal)

    def release(self) -> None:
        """See `RowCache`."""
        self.cache.release()

    @property
    def growing(self) -> list[GrowingCacheLayer]:
        """See `RowCache`."""
        return [layer.own for layer in self.cache.parts]

    def tensors(self) -> Iterator[Tensor]:
        """See `RowCache`."""
        for layer in self.cache.parts:
            yield from _tensors(layer.prompt)
            yield from _tensors(layer.own)


# `RepeatedPrompts` copies the prompts to every row after the prefill. Its columns are the prompt
# columns, then one for each new token. Three rows, of which 0 and 1 share a prompt; P = 3:
#
#             prompt      position of the first new token
#   row 0     · 11 12             2
#   row 1     · 11 12             2
#   row 2    13 14 15             3
#
# `visible` has 3 + new_tokens columns and is False at the padding (row 0 and 1, column 0). The
# model receives the columns in use, the new token's included. It tells the model what to hide, in
# a form that depends on the layers of the model:
#
# - None: no row has padding.
# - a bias [b, 1, 1, columns], a large negative number where `visible` is False: every layer attends
#   to all tokens before the query. Layers use it as it is, and it is made once.
# - `visible` [b, columns]: some layers have windows, chunks, ALiBi or a recurrent state. The model
#   makes the mask of each kind of layer from it, for every token.


class RepeatedPrompts:
    """The `RowCache` that holds the prompt of every row."""

    def __init__(self, module: PreTrainedModel, buffers: CacheBuffers) -> None:
        self.cache = growing_cache(module.config, buffers)
        self.columns = 0
        """The columns in use, counted if there is padding."""
        self._module = module
        self._mask: Tensor | None = None

    def begin_rows(self, prompt_of_row: Tensor, visible: Tensor | None, new_tokens: int) -> None:
        """See `RowCache`."""
        reorder_cache(self.cache, prompt_of_row)
        if visible is None:
            return
        self.columns = visible.shape[1]
        new = visible.new_ones(len(prompt_of_row), new_tokens)
        visible = torch.cat([visible.index_select(0, prompt_of_row), new], 1)
        takes = takes_bias(self._module, self.cache)
        self._mask = _bias(visible, self._module.dtype)[:, None, None] if takes else visible

    def arguments(self) -> dict[str, object]:
        """See `RowCache`."""
        if self._mask is None:
            return {}
        self.columns += 1
        return {"attention_mask": self._mask[..., : self.columns]}

    def remove_rows(self, removal: RowRemoval) -> None:
        """See `RowCache`."""
        remove_rows(self.cache, removal)
        if self._mask is not None:
            self._mask = self._mask[removal.order]

    def release(self) -> None:
        """See `RowCache`."""
        release_cache(self.cache)

    @property
    def growing(self) -> list[GrowingCacheLayer]:
        """See `RowCache`."""
        return [layer for layer in self.cache.layers if isinstance(layer, GrowingCacheLayer)]

    def tensors(self) -> Iterator[Tensor]:
        """See `RowCache`."""
        for layer in self.cache.layers:
            yield from _tensors(layer)


def takes_bias(module: PreTrainedModel, cache: Cache) -> bool:
    """Return whether every layer takes a bias [b, 1, 1, columns] as mask, and uses it as it is."""
    return (
        bool(getattr(module, "_supports_attention_backend", False))
        and module.config._attn_implementation in ("eager", "sdpa")
        and sees_all_tokens(cache)
    )


def _tensors(layer: object) -> Iterator[Tensor]:
    return (value for value in vars(layer).values() if isinstance(value, Tensor))


def _bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores: 0 where `visible` is True, else a large negative number."""
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, torch.finfo(dtype).min)
