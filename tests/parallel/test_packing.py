"""Packing against numbers computed by hand."""

import pytest
import torch

from quadriga.errors import ProtocolError
from quadriga.parallel import packing
from quadriga.parallel.attention_blocks import (
    BLOCK_PAIRS,
    ROWS_PER_BLOCK,
    similar_length_blocks,
    whole_row_blocks,
)
from row_cases import rows_of

IDS = torch.tensor([[0, 11, 12, 21, 22, 0], [0, 11, 12, 31, 0, 0], [13, 14, 15, 41, 42, 43]])
MASK = torch.tensor([[0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
TARGETS = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 1]])


def test_packed_batch_has_each_token_once():
    packed = packing.pack_rows(IDS, MASK, TARGETS)
    assert packed.input_ids.tolist() == [[11, 12, 21, 22, 31, 13, 14, 15, 41, 42, 43]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 2, 0, 1, 2, 3, 4, 5]]
    assert packed.predictors.tolist() == [1, 2, 1, 7, 9]
    assert packed.targets.labels.tolist() == [21, 22, 31, 41, 43]
    assert packed.targets.index.tolist() == [0, 1, 3, 6, 8]
    unpacked = packed.targets.unpack(torch.tensor([1.0, 2, 3, 4, 5]))
    assert unpacked.tolist() == [[1, 2, 0], [3, 0, 0], [4, 0, 5]]


def test_packing_without_shared_prompts():
    packed = packing.pack_rows(IDS, MASK, TARGETS, share_prompts=False)
    assert packed.input_ids.tolist() == [[11, 12, 21, 22, 11, 12, 31, 13, 14, 15, 41, 42, 43]]
    assert packed.predictors.tolist() == [1, 2, 5, 9, 11]


def test_equal_prompts_with_other_experts_are_packed_apart():
    routes = IDS[..., None, None].repeat(1, 1, 2, 1)
    packed = packing.pack_with_routes(IDS, MASK, TARGETS, routes=routes)
    expected = packing.pack_rows(IDS, MASK, TARGETS)
    assert torch.equal(packed.input_ids, expected.input_ids)
    assert torch.equal(packed.targets.labels, expected.targets.labels)
    routes[1, 2, 1] = 5
    packed = packing.pack_with_routes(IDS, MASK, TARGETS, routes=routes)
    assert packed.input_ids.tolist() == [[11, 12, 21, 22, 11, 12, 31, 13, 14, 15, 41, 42, 43]]
    assert packed.routes[5].flatten().tolist() == [12, 5]
    assert packing.in_equal_slices(packed, 4).routes[12:].flatten().tolist() == [43, 43, *[-1] * 6]


def test_contexts_of_a_row_are_rows_which_share_the_tokens_that_they_begin_with():
    ids = torch.tensor([[0, 11, 12, 21, 22, 31, 32, 41, 42, 31, 32, 51]])
    contexts = torch.tensor([[0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3]])
    targets = torch.tensor([[1, 1, 0, 0, 1, 1, 0, 0, 1]])
    packed = packing.pack_rows(ids, contexts, targets)
    assert packed.input_ids.tolist() == [[11, 12, 21, 22, 31, 32, 41, 42, 51]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 2]]
    assert packed.predictors.tolist() == [1, 2, 5, 6, 5]
    assert packed.targets.labels.tolist() == [21, 22, 41, 42, 51]
    assert packed.targets.index.tolist() == [0, 1, 4, 5, 8]
    assert packed.targets.shape == (1, 9)
    apart = packing.pack_with_routes(ids, contexts, targets, routes=ids[..., None, None])
    assert apart.input_ids.tolist() == [[11, 12, 21, 22, 31, 32, 41, 42, 31, 32, 51]]
    assert apart.routes.flatten().tolist() == apart.input_ids.flatten().tolist()
    aligned, found = packing.left_align(ids, contexts, targets)
    assert aligned.tolist() == [[11, 12, 21, 22], [31, 32, 41, 42], [31, 32, 51, 0]]
    assert aligned[found.row, found.position].tolist() == found.labels.tolist()
    assert found.index.tolist() == packed.targets.index.tolist()
    with pytest.raises(ProtocolError, match="where attention_mask is 0"):
        packing.pack_rows(ids, contexts * (contexts != 3), targets)


def test_prompts_with_different_masks_are_different():
    prompts = torch.tensor([[0, 5], [0, 5], [7, 5], [0, 5]])
    mask = torch.tensor([[0, 1], [1, 1], [1, 1], [0, 1]]).bool()
    assert packing.first_row_with_same_prompt(prompts, mask).tolist() == [0, 1, 2, 0]


def test_invalid_batches_are_rejected():
    with pytest.raises(ProtocolError, match="no token before it"):
        packing.pack_rows(torch.ones(1, 3), torch.tensor([[0, 1, 1]]), torch.ones(1, 2))
    with pytest.raises(ProtocolError, match="where attention_mask is 0"):
        packing.pack_rows(torch.ones(1, 3), torch.tensor([[1, 1, 0]]), torch.ones(1, 2))


def test_attention_blocks_by_hand():
    """The example in `attention_blocks.py`. Row 1 uses the packed prompt of row 0."""
    packed = packing.pack_rows(IDS, MASK, TARGETS).rows
    whole = whole_row_blocks(packed)
    rows = [[0, 1, 2, 3, 0, 0], [0, 1, 4, 0, 0, 0], [5, 6, 7, 8, 9, 10]]
    assert whole.blocks[0].queries.tolist() == whole.blocks[0].keys.tolist() == rows
    assert whole.slot_of_token.tolist() == [0, 1, 2, 3, 8, 12, 13, 14, 15, 16, 17]

    split = similar_length_blocks(packed)
    causal, responses = split.blocks
    assert causal.queries.tolist() == causal.keys.tolist() == [rows[2], rows[0]]
    assert causal.mask is None
    assert responses.queries.tolist() == [[2, 3], [4, 0]]
    assert responses.keys.tolist() == [[0, 1, 2, 3], [0, 1, 4, 0]]
    assert responses.first_query.tolist() == [2, 2]
    assert responses.mask[1, 0].int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert split.slot_of_token.tolist() == [6, 7, 12, 13, 14, 0, 1, 2, 3, 4, 5]


def packed(lengths):
    return packing.pack_rows(*rows_of(lengths).values()).rows


def assert_every_token_attends_to_its_row(rows):
    found = similar_length_blocks(rows)
    queries = torch.cat([block.queries.flatten() for block in found.blocks])
    assert queries[found.slot_of_token].tolist() == list(range(len(rows.row)))
    keys = []
    for block in found.blocks:
        assert len(block.queries) <= ROWS_PER_BLOCK
        columns = block.query_columns().expand(len(block.queries), -1)
        for row, of_row in enumerate(columns.tolist()):
            for query, column in enumerate(of_row):
                seen = torch.arange(block.keys.shape[1]) <= column
                if block.mask is not None:
                    assert block.mask[row, 0, query].tolist() == seen.tolist()
                keys.append(block.keys[row][seen].tolist())
    for token, slot in enumerate(found.slot_of_token.tolist()):
        row, column = int(rows.row[token]), int(rows.column[token])
        assert keys[slot] == rows.token_index[row, : column + 1].tolist()


def test_blocks_hold_every_token_with_its_row():
    generator = torch.Generator().manual_seed(0)

    def number(limit):
        return int(torch.randint(limit, (), generator=generator))

    for _ in range(20):
        prompts = [1 + number(12) for _ in range(6)]
        rows = [(i, prompts[i], number(9)) for i in (number(6) for _ in range(1 + number(14)))]
        assert_every_token_attends_to_its_row(packed(rows))
    assert_every_token_attends_to_its_row(packed([(i, 1, i % 3) for i in range(70)]))


def test_a_long_shared_prompt_is_computed_once_and_a_short_one_in_every_row():
    long, short = packed([(0, 9, 2)] * 3), packed([(0, 2, 9)] * 3)
    assert [b.queries.shape for b in similar_length_blocks(long).blocks] == [(1, 9), (3, 2)]
    assert [b.queries.shape for b in similar_length_blocks(short).blocks] == [(3, 11)]


def test_rows_of_similar_length_are_in_one_block():
    def shapes(lengths):
        blocks = similar_length_blocks(packed([(i, 1, n - 1) for i, n in enumerate(lengths)]))
        return [tuple(block.queries.shape) for block in blocks.blocks]

    assert shapes([100, 400, 100]) == [(1, 400), (2, 100)]
    assert shapes([30, 60, 30]) == [(3, 60)]  # 2 · (1830 − 465) = 2730 pairs are less than a block
    assert BLOCK_PAIRS == 8192
    assert shapes([5] * 40) in ([(32, 5), (8, 5)], [(8, 5), (32, 5)])
