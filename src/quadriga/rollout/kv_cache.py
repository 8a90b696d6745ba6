"""A key-value cache with room to grow, whose rows can be dropped.

Appending a token writes in place; the library's dynamic cache copies the whole cache instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_ROOM = 64


class GrowingLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values [B, H, length, D] of one layer, in buffers with spare columns."""

    is_sliding = False
    is_compileable = False
    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = _resized(key_states[:, :, :0], key_states.shape[2])
        self.values = _resized(value_states[:, :, :0], value_states.shape[2])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append columns; returns all columns so far."""
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
        """Keep (or repeat) `rows`."""
        self.keys = _resized(self.keys[:, :, : self.length], 0, rows)
        self.values = _resized(self.values[:, :, : self.length], 0, rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


def _resized(old: Tensor, added: int, rows: Tensor | None = None) -> Tensor:
    """`old` [B, H, length, D] (or some of its rows) in a buffer with room for `added` and more."""
    count, heads, length, width = old.shape
    count = count if rows is None else len(rows)
    new = old.new_empty(count, heads, length + added + _ROOM, width)
    if rows is None:
        new[:, :, :length] = old
    else:
        torch.index_select(old, 0, rows, out=new[:, :, :length])
    return new


def growing_cache(layers: int) -> Cache:
    """An empty cache for a model of `layers` layers."""
    return Cache(layers=[GrowingLayer() for _ in range(layers)])


def select_rows(cache: Cache, rows: Tensor) -> None:
    """Keep (or repeat) `rows` in every layer."""
    layers: list[Any] = cache.layers
    for layer in layers:
        layer.select_rows(rows)
