"""A key-value cache with spare columns, from which rows can be removed.

Appending a token writes in place. The dynamic cache of transformers copies the whole cache for
every token.

Shapes: b rows, H heads, `length` columns in use, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

# Growth for a prompt of 3 tokens and 64 spare columns:
#
#   after               length   columns of the buffer
#   prefill, 3 tokens      3      0 + 3 + 64 =  67
#   64 more tokens        67                    67     written in place
#   the next token        68     67 + 1 + 64 = 132     one copy
#
# Removing rows: three rows, and row 1 has ended.
#
#              buffer before     select_rows([0, 2])
#   row 0      a0 a1 a2 · ·      a0 a1 a2 · ·
#   row 1      b0 b1 b2 · ·      c0 c1 c2 · ·
#   row 2      c0 c1 c2 · ·
#
# Repeating rows, after the prefill of two distinct prompts that three rows use:
# select_rows([0, 0, 1]) gives a, a, b.

_SPARE_COLUMNS = 64


class GrowingCacheLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # as a base class
    """Keys and values [b, H, length, D] of one layer, in buffers with spare columns."""

    is_sliding = False
    is_compileable = False
    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers has no annotations here
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate buffers for the first tokens, whose shape and dtype they take."""
        self.keys = _resized(key_states[:, :, :0], key_states.shape[2])
        self.values = _resized(value_states[:, :, :0], value_states.shape[2])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append columns [b, H, added, D]; return all columns in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        added = key_states.shape[2]
        end = self.length + added
        if end > self.keys.shape[2]:
            self.keys = _resized(self.keys[:, :, : self.length], added)
            self.values = _resized(self.values[:, :, : self.length], added)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def select_rows(self, rows: Tensor) -> None:
        """Keep only `rows`, in their order. A row may be repeated."""
        self.keys = _resized(self.keys[:, :, : self.length], 0, rows)
        self.values = _resized(self.values[:, :, : self.length], 0, rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (columns of the mask for `query_length` new tokens, offset of the first)."""
        return self.length + query_length, 0

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


def growing_cache(layers: int) -> Cache:
    """Return an empty cache for a model of `layers` layers."""
    return Cache(layers=[GrowingCacheLayer() for _ in range(layers)])


def select_rows(cache: Cache, rows: Tensor) -> None:
    """Keep only `rows` in every layer, in their order. A row may be repeated."""
    for layer in cache.layers:
        assert isinstance(layer, GrowingCacheLayer)
        layer.select_rows(rows)
