"""The growing key-value cache: buffer sizes, contents, and selected rows."""

from __future__ import annotations

import torch

from quadriga.rollout.kv_cache import GrowingCacheLayer, growing_cache, select_rows


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


def test_select_rows_removes_and_repeats_rows_in_every_layer():
    cache = growing_cache(2)
    for index in range(2):
        cache.update(tokens(3), tokens(3), index)
    select_rows(cache, torch.tensor([0, 0, 1]))
    for layer in cache.layers:
        keys, _ = layer.update(torch.full((3, 1, 1, 1), 9.0), torch.zeros(3, 1, 1, 1))
        assert keys[:, 0, :, 0].tolist() == [[0, 1, 2, 9], [0, 1, 2, 9], [3, 4, 5, 9]]
    select_rows(cache, torch.tensor([2]))
    assert cache.layers[1].keys[0, 0, :4, 0].tolist() == [3, 4, 5, 9]
