"""The growing key-value cache: buffer sizes, contents, and selected rows."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, MistralConfig

from quadriga.rollout.hf.kv_cache import (
    CacheBuffers,
    GrowingCacheLayer,
    growing_cache,
    release_cache,
    reorder_cache,
    sees_all_tokens,
)


def tokens(count: int) -> torch.Tensor:
    """Keys of `count` tokens for two rows, one head and head size 1."""
    return torch.arange(2.0 * count).view(2, 1, count, 1)


def test_buffer_grows_once_in_65_tokens():
    """The example in `kv_cache.py`."""
    layer = GrowingCacheLayer()
    layer.update(tokens(3), tokens(3))
    assert layer.keys.shape[2] == 67
    for _ in range(64):
        layer.update(tokens(1), tokens(1))
    assert (layer.length, layer.keys.shape[2]) == (67, 67)
    keys, values = layer.update(tokens(1), tokens(1) + 5)
    assert (layer.length, layer.keys.shape[2]) == (68, 132)
    assert keys[:, 0, :3, 0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert keys[:, 0, -1, 0].tolist() == [0, 1]
    assert values[:, 0, -1, 0].tolist() == [5, 6]


def test_reorder_cache_removes_and_repeats_rows_in_every_layer():
    cache = growing_cache(LlamaConfig(num_hidden_layers=2))
    assert sees_all_tokens(cache)
    for index in range(2):
        cache.update(tokens(3), tokens(3), index)
    reorder_cache(cache, torch.tensor([0, 0, 1]))
    for layer in cache.layers:
        keys, _ = layer.update(torch.full((3, 1, 1, 1), 9.0), torch.zeros(3, 1, 1, 1))
        assert keys[:, 0, :, 0].tolist() == [[0, 1, 2, 9], [0, 1, 2, 9], [3, 4, 5, 9]]
    reorder_cache(cache, torch.tensor([2]))
    assert cache.layers[1].keys[0, 0, :4, 0].tolist() == [3, 4, 5, 9]


def test_window_layer_returns_the_columns_that_the_next_token_sees():
    """The example in `kv_cache.py`."""
    cache = growing_cache(MistralConfig(num_hidden_layers=1, sliding_window=3))
    assert not sees_all_tokens(cache) and cache.is_sliding == [True]
    (layer,) = cache.layers
    layer.update(tokens(5), tokens(5))
    assert layer.get_mask_sizes(1) == (3, 3)
    keys, values = layer.update(tokens(1) + 20, tokens(1) + 30)
    assert keys[:, 0, :, 0].tolist() == [[3, 4, 20], [8, 9, 21]]
    assert values[0, 0, :, 0].tolist() == [3, 4, 30]


def test_the_next_micro_batch_uses_the_buffers_of_the_last_one():
    buffers = CacheBuffers()
    config = LlamaConfig(num_hidden_layers=2)
    addresses = []
    for count in (6, 3):
        cache = growing_cache(config, buffers)
        assert buffers.free_bytes == (0 if count == 6 else 4 * 2 * (6 + 64) * 4)
        for index in range(2):
            keys, values = cache.update(tokens(count), tokens(count) + 1, index)
            assert torch.equal(keys, tokens(count)) and torch.equal(values, tokens(count) + 1)
        assert buffers.free_bytes == 0
        addresses.append(sorted(t.data_ptr() for x in cache.layers for t in (x.keys, x.values)))
        for layer in cache.layers:  # the next cache must not read what is left in its buffers
            layer.keys.fill_(torch.nan)
            layer.values.fill_(torch.nan)
        release_cache(cache)
        assert [layer.get_seq_length() for layer in cache.layers] == [0, 0]
    assert addresses[0] == addresses[1]


def test_buffers_in_use_and_free_ones_need_no_more_than_the_largest_cache():
    """The example in `kv_cache.py`, with keys and values."""
    buffers = CacheBuffers()

    def element_count(layer):
        used = layer.keys.untyped_storage().nbytes() + layer.values.untyped_storage().nbytes()
        return (used + buffers.free_bytes) // 4 // 2

    first = GrowingCacheLayer(buffers=buffers)
    first.update(tokens(3), tokens(3))
    largest = element_count(first)
    first.update(tokens(100), tokens(100))
    assert element_count(first) > largest and buffers.free_bytes == 0
    largest = element_count(first)
    first.release()
    second = GrowingCacheLayer(buffers=buffers)
    second.update(tokens(5), tokens(5))
    assert element_count(second) == largest
    second.reorder_cache(torch.tensor([1]))
    assert element_count(second) < largest
    second.release()
    third = GrowingCacheLayer(buffers=buffers)
    third.update(tokens(200), tokens(200))
    assert buffers.free_bytes == 0
