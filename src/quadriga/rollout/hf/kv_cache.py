"""A key-value cache with spare columns, from which rows can be removed.

Appending a token writes in place. The dynamic cache of transformers copies the whole cache for
every token.

Shapes: b rows, H heads, `length` columns in use, `seen` of them that the next query can see, D head
size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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
# Removing rows: four rows, and row 1 has ended. The last row takes its place, so that one row is
# copied, within the buffer. The place behind the last row stays unused until the buffer grows.
#
#              buffer before     remove_rows: order 0 3 2
#   row 0      a0 a1 a2 · ·      a0 a1 a2 · ·
#   row 1      b0 b1 b2 · ·      d0 d1 d2 · ·
#   row 2      c0 c1 c2 · ·      c0 c1 c2 · ·
#   row 3      d0 d1 d2 · ·
#
# Repeating rows, after the prefill of two distinct prompts that three rows use:
# reorder_cache([0, 0, 1]) gives a, a, b.
#
# Sliding window of 3 (a token and the two before it), 5 columns in use, one token is appended:
#
#   column            0  1  2  3  4  5
#   returned                   3  4  5      views of the buffer; the older columns stay in it
#   get_mask_sizes(1) = (3, 3): the mask has 3 columns, and its first is column 3

# Memory of three caches after one another, of one buffer each. The sizes are numbers of elements:
#
#   micro-batch           needs   from       free afterwards
#   1, prefill            100     new        -
#   1, the next token     180     new        -              the buffer of 100 is freed
#   1 ends                                   180
#   2, prefill            120     the 180    -
#   2, rows are removed    90     new        -              the 180 is freed
#   2 ends                                   90
#   3, prefill            100     new        -              the 90 is dropped: it is too small

_SPARE_COLUMNS = 64


@dataclass(frozen=True)
class RowRemoval:
    """Rows that leave a batch. The last rows that stay take the places of those that leave.

    Attributes:
        order: [rows that stay] int64, the row that is in each place afterwards.
        places, sources: [moved] int64, where a row moves to, and where it was. No place is a
            source.
    """

    order: Tensor
    places: Tensor
    sources: Tensor

    @staticmethod
    def of(stays: Tensor) -> RowRemoval:
        """Return the removal of the rows where `stays` [b] is False."""
        # stays 1 0 1 0 1: three rows stay, so row 4 moves to place 1.
        kept = stays.nonzero()[:, 0]
        order = torch.arange(len(kept), device=stays.device)
        places = (~stays[: len(kept)]).nonzero()[:, 0]
        sources = kept[len(kept) - len(places) :]
        order[places] = sources
        return RowRemoval(order, places, sources)


class CacheBuffers:
    """Memory that the caches of successive micro-batches use one after the other.

    Buffers in use and free ones together need no more memory than one cache at its largest: a
    buffer is kept only if another kept one takes its place, or at the end of a micro-batch.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    @property
    def free_bytes(self) -> int:
        """The bytes that are kept for the next cache."""
        return sum(flat.nbytes for flat in self._free)

    def take(self, like: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, bool]:
        """Return a buffer of a shape, with the dtype and device of `like`, and whether it was kept.

        Its values are undefined. The smallest one that suffices is taken.
        """
        count = math.prod(shape)
        kind = (like.dtype, like.device)
        fitting = [f for f in self._free if (f.dtype, f.device) == kind and f.numel() >= count]
        if fitting:
            flat = min(fitting, key=Tensor.numel)
            self._remove(flat)
            return flat[:count].view(shape), True
        if self._free:
            # The new buffer takes the place of one that is too small.
            self._remove(max(self._free, key=Tensor.numel))
        return like.new_empty(shape), False

    def give(self, buffer: Tensor) -> None:
        """Keep the memory of a buffer that is no longer used."""
        whole = buffer.new_empty(0).set_(buffer.untyped_storage())
        self._free.append(whole)

    def _remove(self, flat: Tensor) -> None:
        self._free = [other for other in self._free if other is not flat]


class GrowingCacheLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # as a base class
    """Keys and values [b, H, length, D] of one layer, in buffers with spare columns.

    Args:
        window: the tokens that a query can see, itself included. None: all tokens before it.
        buffers: the memory of earlier caches.
        spare_columns: columns that a new buffer has beside those that it must hold.
    """

    is_compileable = False
    keys: Tensor
    values: Tensor

    def __init__(
        self,
        window: int | None = None,
        buffers: CacheBuffers | None = None,
        spare_columns: int = _SPARE_COLUMNS,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers has no annotations here
        self.length = 0
        self.window = window
        self.is_sliding = window is not None
        self._buffers = buffers or CacheBuffers()
        self._spare_columns = spare_columns

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate buffers for the first tokens, whose shape and dtype they take."""
        self.keys, _ = self._resized(key_states[:, :, :0], key_states.shape[2])
        self.values, _ = self._resized(value_states[:, :, :0], value_states.shape[2])
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
            self.keys = self._replaced(self.keys, added)
            self.values = self._replaced(self.values, added)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, start:end], self.values[:, :, start:end]

    def columns(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values in use."""
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def _first_seen(self) -> int:
        """Return the first column that the next token can see."""
        return 0 if self.window is None else max(0, self.length + 1 - self.window)

    def reorder_cache(self, rows: Tensor) -> None:
        """Keep only `rows`, in their order, in another buffer. A row may be repeated."""
        if self.is_initialized:
            self.keys = self._replaced(self.keys, 0, rows)
            self.values = self._replaced(self.values, 0, rows)

    def remove_rows(self, removal: RowRemoval) -> None:
        """Remove rows in place."""
        if self.is_initialized:
            self.keys = self._moved(self.keys, removal)
            self.values = self._moved(self.values, removal)

    def _moved(self, buffer: Tensor, removal: RowRemoval) -> Tensor:
        used = buffer[:, :, : self.length]
        used.index_copy_(0, removal.places, used.index_select(0, removal.sources))
        return buffer[: len(removal.order)]

    def release(self) -> None:
        """Keep the buffers for the next cache. This layer is empty then."""
        if self.is_initialized:
            self._buffers.give(self.keys)
            self._buffers.give(self.values)
            del self.keys, self.values
            self.length, self.is_initialized = 0, False

    def _replaced(self, old: Tensor, added: int, rows: Tensor | None = None) -> Tensor:
        """Return the columns in use, or some of their rows, in another buffer; keep the old one if
        the other one was kept too."""
        new, was_kept = self._resized(old[:, :, : self.length], added, rows)
        if was_kept:
            self._buffers.give(old)
        return new

    def _resized(self, old: Tensor, added: int, rows: Tensor | None = None) -> tuple[Tensor, bool]:
        """Copy `old` [b, H, length, D], or some of its rows, to a buffer with space for `added`
        more columns and the spare ones; return it, and whether it was kept before."""
        count, heads, length, width = old.shape
        count = count if rows is None else len(rows)
        shape = (count, heads, length + added + self._spare_columns, width)
        new, was_kept = self._buffers.take(old, shape)
        if rows is None:
            new[:, :, :length] = old
        else:
            torch.index_select(old, 0, rows, out=new[:, :, :length])
        return new, was_kept

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


def columns_at_end(first: int, tokens: int) -> int:
    """Return the columns of a buffer of `first` columns after it has grown, one token at a time, to
    hold `tokens`."""
    columns = first
    while columns < tokens:
        columns += 1 + _SPARE_COLUMNS
    return columns


def columns_before(columns: int) -> int:
    """Return the columns of the buffer that was full when one of `columns` took its place."""
    return columns - 1 - _SPARE_COLUMNS


def reorder_cache(cache: Cache, rows: Tensor) -> None:
    """Keep only `rows` in every layer, in their order. A row may be repeated."""
    for layer in cache.layers:
        layer.reorder_cache(rows)  # type: ignore[arg-type]  # LongTensor


def remove_rows(cache: Cache, removal: RowRemoval) -> None:
    """Remove rows in every layer. Layers with a recurrent state copy the rows that stay."""
    for layer in cache.layers:
        if isinstance(layer, GrowingCacheLayer):
            layer.remove_rows(removal)
        else:
            layer.reorder_cache(removal.order)  # type: ignore[arg-type]  # LongTensor


def release_cache(cache: Cache) -> None:
    """Keep the buffers of a cache for the next one with the same `CacheBuffers`."""
    for layer in cache.layers:
        if isinstance(layer, GrowingCacheLayer):
            layer.release()


def growing_cache(config: PreTrainedConfig, buffers: CacheBuffers | None = None) -> Cache:
    """Return an empty cache for a model of this config. `buffers`: the memory of earlier caches.

    Transformers chooses the kind of each layer. Growing layers take the place of its full and
    sliding-window layers; layers with a recurrent state stay as they are.
    """
    layers = DynamicCache(config=config).layers
    return Cache(layers=[_growing_layer(layer, buffers) for layer in layers])


def _growing_layer(layer: CacheLayer, buffers: CacheBuffers | None) -> CacheLayer:
    if type(layer) is DynamicLayer:
        return GrowingCacheLayer(buffers=buffers)
    if type(layer) is DynamicSlidingWindowLayer:
        return GrowingCacheLayer(layer.sliding_window, buffers)
    return layer


def sees_all_tokens(cache: Cache) -> bool:
    """Return whether every layer holds keys and values and sees all tokens before the query."""
    return all(
        isinstance(layer, GrowingCacheLayer) and layer.window is None for layer in cache.layers
    )
