"""Packing against numbers computed by hand, and packed attention against single rows."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    sliding_window_causal_mask_function,
)

from quadriga.errors import ProtocolError, ShapeError
from quadriga.parallel.packing import first_row_with_same_prompt, pack_rows

IDS = torch.tensor([[0, 11, 12, 21, 22, 0], [0, 11, 12, 31, 0, 0], [13, 14, 15, 41, 42, 43]])
MASK = torch.tensor([[0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
TARGETS = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 1]])


def test_packed_batch_has_each_token_once():
    packed = pack_rows(IDS, MASK, TARGETS)
    assert packed.input_ids.tolist() == [[11, 12, 21, 22, 31, 13, 14, 15, 41, 42, 43]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 1, 2, 3, 4, 5]]
    assert packed.predictors.tolist() == [1, 2, 1, 7, 9]
    assert packed.labels.tolist() == [21, 22, 31, 41, 43]
    assert packed.target_index.tolist() == [0, 1, 3, 6, 8]
    unpacked = packed.unpack(torch.tensor([1.0, 2, 3, 4, 5]))
    assert unpacked.tolist() == [[1, 2, 0], [3, 0, 0], [4, 0, 5]]


def test_packing_without_shared_prompts():
    packed = pack_rows(IDS, MASK, TARGETS, share_prompts=False)
    assert packed.input_ids.tolist() == [[11, 12, 21, 22, 11, 12, 31, 13, 14, 15, 41, 42, 43]]
    assert packed.predictors.tolist() == [1, 2, 5, 9, 11]


def test_prompts_with_different_masks_are_different():
    prompts = torch.tensor([[0, 5], [0, 5], [7, 5], [0, 5]])
    mask = torch.tensor([[0, 1], [1, 1], [1, 1], [0, 1]]).bool()
    assert first_row_with_same_prompt(prompts, mask).tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("window", [None, 3])
def test_packed_attention_equals_attention_of_single_rows(split, window):
    from quadriga.engines.packed_attention import packed_attention, packed_mask

    packed = pack_rows(IDS, MASK, TARGETS, split_attention=split)
    assert len(packed.attention_blocks.blocks) == (2 if split else 1)
    rows = [[0, 1, 2, 3], [0, 1, 4], [5, 6, 7, 8, 9, 10]]
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(11, 2, 4, generator=random) for _ in range(3))
    expected = torch.zeros_like(q)
    for tokens in rows:
        for column, token in enumerate(tokens):
            first = 0 if window is None else max(0, column + 1 - window)
            seen = tokens[first : column + 1]
            scores = torch.einsum("hd,thd->ht", q[token], k[seen]) / 2.0
            expected[token] = torch.einsum("ht,thd->hd", scores.softmax(-1), v[seen])
    mask = packed_mask(mask_function=causal_mask_function)
    if window is not None:
        function = sliding_window_causal_mask_function(window)
        mask = packed_mask(mask_function=function, local_size=window)
    found, _ = packed_attention(
        torch.nn.Module(),
        *(x.transpose(0, 1)[None] for x in (q, k, v)),
        mask,
        attention_blocks=packed.attention_blocks,
    )
    assert torch.allclose(found[0], expected, atol=1e-6)


def test_invalid_batches_are_rejected():
    with pytest.raises(ProtocolError, match="no token before it"):
        pack_rows(torch.ones(1, 3), torch.tensor([[0, 1, 1]]), torch.ones(1, 2))
    with pytest.raises(ProtocolError, match="where attention_mask is 0"):
        pack_rows(torch.ones(1, 3), torch.tensor([[1, 1, 0]]), torch.ones(1, 2))
    with pytest.raises(ShapeError, match="prompt"):
        pack_rows(torch.ones(1, 3), torch.ones(1, 3), torch.ones(1, 3))
    with pytest.raises(ShapeError, match=r"\(2, 3\)"):
        pack_rows(torch.ones(1, 3), torch.ones(2, 3), torch.ones(1, 2))


def test_attention_blocks_by_hand():
    """The example in `attention_blocks.py`. Row 1 uses the packed prompt of row 0."""
    whole = pack_rows(IDS, MASK, TARGETS, split_attention=False).attention_blocks
    rows = [[0, 1, 2, 3, 0, 0], [0, 1, 4, 0, 0, 0], [5, 6, 7, 8, 9, 10]]
    assert whole.blocks[0].queries.tolist() == whole.blocks[0].keys.tolist() == rows
    assert whole.slot_of_token.tolist() == [0, 1, 2, 3, 8, 12, 13, 14, 15, 16, 17]

    split = pack_rows(IDS, MASK, TARGETS).attention_blocks
    prompts, responses = split.blocks
    assert prompts.queries.tolist() == [[0, 1, 2], [5, 6, 7]]
    assert responses.queries.tolist() == [[8, 9, 10], [2, 3, 0], [4, 0, 0]]
    assert responses.keys.tolist() == [rows[2], rows[0], rows[1]]
    assert responses.first_query.tolist() == [3, 2, 2]
    assert responses.mask[1, 0].int().tolist() == [
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
    ]
    assert split.slot_of_token.tolist() == [0, 1, 9, 10, 12, 3, 4, 5, 6, 7, 8]
