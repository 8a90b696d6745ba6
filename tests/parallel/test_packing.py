"""Packing by hand, and attention over packed rows against a dense mask."""

from __future__ import annotations

import pytest
import torch

from quadriga.errors import ProtocolError, ShapeError
from quadriga.parallel.packing import first_row_with_same_prompt, pack_rows

IDS = torch.tensor([[0, 11, 12, 21, 22, 0], [0, 11, 12, 31, 0, 0], [13, 14, 15, 41, 42, 43]])
MASK = torch.tensor([[0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
TARGETS = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 1]])


def test_each_token_once():
    packed = pack_rows(IDS, MASK, TARGETS)
    assert packed.input_ids.tolist() == [[11, 12, 21, 22, 31, 13, 14, 15, 41, 42, 43]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 1, 2, 3, 4, 5]]
    assert packed.predictors.tolist() == [1, 2, 1, 7, 9]
    assert packed.labels.tolist() == [21, 22, 31, 41, 43]
    assert packed.places.tolist() == [0, 1, 3, 6, 8]
    unpacked = packed.unpack(torch.tensor([1.0, 2, 3, 4, 5]))
    assert unpacked.tolist() == [[1, 2, 0], [3, 0, 0], [4, 0, 5]]


def test_prompts_need_not_be_shared():
    packed = pack_rows(IDS, MASK, TARGETS, share_prompts=False)
    assert packed.input_ids.tolist() == [[11, 12, 21, 22, 11, 12, 31, 13, 14, 15, 41, 42, 43]]
    assert packed.predictors.tolist() == [1, 2, 5, 9, 11]


def test_equal_tokens_under_another_mask_are_another_prompt():
    prompts = torch.tensor([[0, 5], [0, 5], [7, 5], [0, 5]])
    mask = torch.tensor([[0, 1], [1, 1], [1, 1], [0, 1]]).bool()
    assert first_row_with_same_prompt(prompts, mask).tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_over_blocks(split, window):
    from quadriga.engines.packed_attention import packed_attention

    packed = pack_rows(IDS, MASK, TARGETS, split_attention=split)
    assert len(packed.layout.blocks) == (2 if split else 1)
    rows = [[0, 1, 2, 3], [0, 1, 4], [5, 6, 7, 8, 9, 10]]
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(11, 2, 4, generator=random) for _ in range(3))
    expected = torch.zeros_like(q)
    for tokens in rows:
        for place, token in enumerate(tokens):
            first = 0 if window is None else max(0, place + 1 - window)
            seen = tokens[first : place + 1]
            scores = torch.einsum("hd,thd->ht", q[token], k[seen]) / 2.0
            expected[token] = torch.einsum("ht,thd->hd", scores.softmax(-1), v[seen])
    found, _ = packed_attention(
        torch.nn.Module(),
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        None,
        row_layout=packed.layout,
        sliding_window=window,
    )
    assert torch.allclose(found[0], expected, atol=1e-6)


def test_mistakes_are_named():
    with pytest.raises(ProtocolError, match="no token before it"):
        pack_rows(torch.ones(1, 3), torch.tensor([[0, 1, 1]]), torch.ones(1, 2))
    with pytest.raises(ProtocolError, match="leaves out"):
        pack_rows(torch.ones(1, 3), torch.tensor([[1, 1, 0]]), torch.ones(1, 2))
    with pytest.raises(ShapeError, match="prompt"):
        pack_rows(torch.ones(1, 3), torch.ones(1, 3), torch.ones(1, 3))
    with pytest.raises(ShapeError, match=r"\(2, 3\)"):
        pack_rows(torch.ones(1, 3), torch.ones(2, 3), torch.ones(1, 2))
