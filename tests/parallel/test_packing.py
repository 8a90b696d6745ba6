"""Packing against numbers computed by hand."""

from __future__ import annotations

import pytest
import torch

from quadriga.errors import ProtocolError, ShapeError
from quadriga.parallel.attention_blocks import prompt_and_response_blocks, whole_row_blocks
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
    packed = pack_rows(IDS, MASK, TARGETS).rows
    whole = whole_row_blocks(packed)
    rows = [[0, 1, 2, 3, 0, 0], [0, 1, 4, 0, 0, 0], [5, 6, 7, 8, 9, 10]]
    assert whole.blocks[0].queries.tolist() == whole.blocks[0].keys.tolist() == rows
    assert whole.slot_of_token.tolist() == [0, 1, 2, 3, 8, 12, 13, 14, 15, 16, 17]

    split = prompt_and_response_blocks(packed)
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
