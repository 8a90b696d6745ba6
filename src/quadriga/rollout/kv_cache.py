"""A key-value cache with room to grow, whose rows can be dropped.

Appending a token writes in place; the library's dynamic cache copies the whole cache instead.
"""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_ROOM = 64


class GrowingLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values [B, H, length, D] of one layer, in buffers with spare columns."""

    is_sliding = False
    is_compileable = False

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._with_room(key_states[:, :, :0], key_states.shape[2])
        self.values = self._with_room(value_states[:, :, :0], value_states.shape[2])
        self.is_initialized = True

    @staticmethod
    def _with_room(old: Tensor, needed: int) -> Tensor:
        rows, heads, length, width = old.shape
        new = old.new_empty(rows, heads, length + needed + _ROOM, width)
        new[:, :, :length] = old
        return new

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append columns; returns all columns so far."""
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        added = key_states.shape[2]
        end = self.length + added
        if end > self.keys.shape[2]:
            self.keys = self._with_room(self.keys[:, :, : self.length], added)
            self.values = self._with_room(self.values[:, :, : self.length], added)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def select_rows(self, rows: Tensor) -> None:
        """Keep (or repeat) `rows`."""
        if self.keys is not None and self.values is not None:
            self.keys = self.keys.index_select(0, rows)
            self.values = self.values.index_select(0, rows)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


def growing_cache(layers: int) -> Cache:
    """An empty cache for a model of `layers` layers."""
    return Cache(layers=[GrowingLayer() for _ in range(layers)])


def select_rows(cache: Cache, rows: Tensor) -> None:
    """Keep (or repeat) `rows` in every layer."""
    for layer in cache.layers:
        layer.select_rows(rows)
