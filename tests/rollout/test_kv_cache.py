"""The growing key-value cache: buffer sizes, contents, and selected rows."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, MistralConfig

from quadriga.rollout.hf.kv_cache import (
    GrowingCacheLayer,
    growing_cache,
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
