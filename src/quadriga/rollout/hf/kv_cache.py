"""A key-value cache with spare columns, from which rows can be removed.

Appending a token writes in place. The dynamic cache of transformers copies the whole cache for
every token.

Shapes: b rows, H heads, `length` columns in use, `seen` of them that the next query can see, D head
size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

if TYPE_CHECKING:
    # transformers has DummyLayer since 5.20. The environments of vLLM and SGLang have 5.19.
    from transformers.cache_utils import DummyLayer

    CacheLayer = CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer
    """A layer with keys and values, with a recurrent state, or without either."""

# Growth for a prompt of 3 tokens and 64 spare columns:
#
#   after               length   columns of the buffer
#   prefill, 3 tokens      3      0 + 3 + 64 =  67
#   64 more tokens        67                    67     written in place
#   the next token        68     67 + 1 + 64 = 132     one copy
#
# Removing rows: three rows, and row 1 has ended.
#
#              buffer before     reorder_cache([0, 2])
#   row 0      a0 a1 a2 · ·      a0 a1 a2 · ·
#   row 1      b0 b1 b2 · ·      c0 c1 c2 · ·
#   row 2      c0 c1 c2 · ·
#
# Repeating rows, after the prefill of two distinct prompts that three rows use:
# reorder_cache([0, 0, 1]) gives a, a, b.
#
# Sliding window of 3 (a token and the two before it), 5 columns in use, one token is appended:
#
#   column            0  1  2  3  4  5
#   returned                   3  4  5      views of the buffer; the older columns stay in it
#   get_mask_sizes(1) = (3, 3): the mask has 3 columns, and its first is column 3

_SPARE_COLUMNS = 64


class GrowingCacheLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # as a base class
    """Keys and values [b, H, length, D] of one layer, in buffers with spare columns.

    Args:
        window: the tokens that a query can see, itself included. None: all tokens before it.
    """

    is_compileable = False
    keys: Tensor
    values: Tensor

    def __init__(self, window: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers has no annotations here
        self.length = 0
        self.window = window
        self.is_sliding = window is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate buffers for the first tokens, whose shape and dtype they take."""
        self.keys = _resized(key_states[:, :, :0], key_states.shape[2])
        self.values = _resized(value_states[:, :, :0], value_states.shape[2])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append columns [b, H, added, D]; return the columns that the added tokens can see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        added = key_states.shape[2]
        start, end = self._first_seen(), self.length + added
        if end > self.keys.shape[2]:
            self.keys = _resized(self.keys[:, :, : self.length], added)
            self.values = _resized(self.values[:, :, : self.length], added)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, start:end], self.values[:, :, start:end]

    def _first_seen(self) -> int:
        """Return the first column that the next token can see."""
        return 0 if self.window is None else max(0, self.length + 1 - self.window)

    def reorder_cache(self, rows: Tensor) -> None:
        """Keep only `rows`, in their order. A row may be repeated."""
        if self.is_initialized:
            self.keys = _resized(self.keys[:, :, : self.length], 0, rows)
            self.values = _resized(self.values[:, :, : self.length], 0, rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (columns of the mask for `query_length` new tokens, offset of the first)."""
        start = self._first_seen()
        return self.length + query_length - start, start

    def get_seq_length(self) -> int:
        """Return the number of columns in use."""
        return self.length

    def get_max_length(self) -> int:
        """Return -1: the cache grows without limit."""
        return -1


def _resized(old: Tensor, added: int, rows: Tensor | None = None) -> Tensor:
    """Copy `old` [b, H, length, D], or some of its rows, to a buffer with space for `added` more.

    The buffer has `_SPARE_COLUMNS` columns on top.
    """
    count, heads, length, width = old.shape
    count = count if rows is None else len(rows)
    new = old.new_empty(count, heads, length + added + _SPARE_COLUMNS, width)
    if rows is None:
        new[:, :, :length] = old
    else:
        torch.index_select(old, 0, rows, out=new[:, :, :length])
    return new


def columns_at_end(prompt: int, added: int) -> int:
    """Return the columns of a buffer after a prompt and `added` more tokens, one at a time."""
    columns = prompt + _SPARE_COLUMNS
    while columns < prompt + added:
        columns += 1 + _SPARE_COLUMNS
    return columns


def columns_before(columns: int) -> int:
    """Return the columns of the buffer that was full when one of `columns` took its place."""
    return columns - 1 - _SPARE_COLUMNS


def reorder_cache(cache: Cache, rows: Tensor) -> None:
    """Keep only `rows` in every layer, in their order. A row may be repeated."""
    for layer in cache.layers:
        layer.reorder_cache(rows)  # type: ignore[arg-type]  # LongTensor


def growing_cache(config: PreTrainedConfig) -> Cache:
    """Return an empty cache for a model of this config.

    Transformers chooses the kind of each layer. Growing layers take the place of its full and
    sliding-window layers; layers with a recurrent state stay as they are.
    """
    layers = DynamicCache(config=config).layers
    return Cache(layers=[_growing_layer(layer) for layer in layers])


def _growing_layer(layer: CacheLayer) -> CacheLayer:
    if type(layer) is DynamicLayer:
        return GrowingCacheLayer()
    if type(layer) is DynamicSlidingWindowLayer:
        return GrowingCacheLayer(layer.sliding_window)
    return layer


def sees_all_tokens(cache: Cache) -> bool:
    """Return whether every layer holds keys and values and sees all tokens before the query."""
    return all(
        isinstance(layer, GrowingCacheLayer) and layer.window is None for layer in cache.layers
    )
