"""Which packed tokens make up each row, and the blocks of padded rows for attention with a mask.

Every layer but attention works token by token and sees the N packed tokens once. Attention needs
rows: the tokens that one token may attend to. This module arranges packed tokens in blocks of rows.

Shapes: B rows, N packed tokens, L tokens of the longest row. In a block: b rows, Lq query slots and
Lk key slots a row. A *slot* is one entry of a block's `queries` or `keys`. A *column* is the
position of a token in its own row without padding, so padding is last and causal attention never
reads it.

Two arrangements compute the same function:

- whole rows: one block of all rows, where queries and keys are the same tokens. It needs no mask,
  so an accelerator can use its fastest causal kernel.
- causal sequences and responses: rows, or prompts that several rows share, in causal blocks; then
  the response tokens of the rows with a shared prompt as queries against their whole rows.
  Sequences of similar length are in one block, so there is little padding, and the queries of a
  long shared prompt are computed once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quadriga.parallel.device import on_device

# The example of `packing.py`: rows 0 and 1 share the prompt (11 12), row 2 has its own.
#
#   packed index   0   1   2   3   4   5   6   7   8   9  10
#   input_ids     11  12  21  22  31  13  14  15  41  42  43
#
#   token_index    column 0  1  2  3  4  5       prompt_length  length  prompt_owner
#          row 0          0  1  2  3  ·  ·             2           4          0
#          row 1          0  1  4  ·  ·  ·             2           3          0
#          row 2          5  6  7  8  9 10             3           6          2
#
# Row 1 repeats the packed tokens 0 and 1. `engines/attention` has kernels that need no padded rows
# (`varlen`, `flex`), for CUDA devices.
#
# Whole rows: one block with queries = keys = token_index ("·" is padding and holds index 0), and
#
#   slot_of_token  0   1   2   3   8  12  13  14  15  16  17       row · 6 + column
#
# Causal sequences and responses: two blocks, 16 query slots instead of 18. Attention of row 2,
# whose prompt no other row has, takes 1 + 2 + … + 6 = 21 pairs of a query and a key. Rows 0 and 1
# would take 10 + 6 pairs as whole rows. They take 3 for their prompt, 2 · 4 + 1 · 3 for responses.
#
#   block 0: causal, longest first      block 1: responses, longest row first
#   queries = keys                      queries    keys          first_query
#     row 2   5 6 7 8 9 10                row 0   2 3   0 1 2 3      2
#     row 0   0 1 * *  ·  ·               row 1   4 ·   0 1 4 ·      2
#   * columns 2 and 3 of row 0 belong
#     to the response; the outputs of
#     these slots are not read
#
#   slot_of_token  6   7  12  13  14   0   1   2   3   4   5       block 1 starts at slot 12
#
# Query slot j of a row is in column first_query + j and attends to the columns up to its own.
# `mask` of row 1 in block 1 (its query columns are 2 and the padding 3):
#
#   key column        0  1  2  3
#   query column 2    1  1  1  ·       token 31 attends to 11 12 31
#   query column 3    1  1  1  1       padding: its output is not read

ROWS_PER_BLOCK = 32
"""The most rows of one block. Some kernels hold the scores of a whole block."""

BLOCK_PAIRS = 2**13
"""What one more block costs, in pairs of a query and a key. On a CPU, gathering its rows and
calling the kernel takes, forward and backward, as long as the attention of about so many pairs."""


@dataclass(frozen=True)
class AttentionBlock:
    """Rows of packed tokens for one call of the attention kernel.

    Attributes:
        queries: [b, Lq] int64, the packed index of each query slot. Padding has index 0.
        keys: [b, Lk] int64, the same for the key slots.
        first_query: [b] int64, the column of a row's first query. None: column 0 in every row, and
            queries and keys are the same tokens.
        mask: [b, 1, Lq, Lk] bool, True where a query attends to a key. None: plain causal
            attention.
    """

    queries: Tensor
    keys: Tensor
    first_query: Tensor | None = None
    mask: Tensor | None = None

    def query_columns(self) -> Tensor:
        """Return the columns [b or 1, Lq] of the query slots in their own rows."""
        device = self.queries.device
        first = torch.zeros(1, dtype=torch.int64, device=device)
        first = first if self.first_query is None else self.first_query
        return first[:, None] + torch.arange(self.queries.shape[1], device=device)


@dataclass(frozen=True)
class AttentionBlocks:
    """All blocks of a packed micro-batch.

    Attributes:
        blocks: the blocks.
        slot_of_token: [N] int64, the query slot that holds a packed token's output. Slots are
            numbered through all blocks, row by row.
    """

    blocks: tuple[AttentionBlock, ...]
    slot_of_token: Tensor

    def to(self, device: torch.device) -> AttentionBlocks:
        """Return the same blocks with their tensors on `device`."""
        blocks = tuple(on_device(block, device) for block in self.blocks)
        return on_device(replace(self, blocks=blocks), device)


@dataclass(frozen=True)
class PackedRows:
    """Which packed tokens make up each of B rows.

    Attributes:
        token_index: [B, L] int64, the packed index of the token in each column of a row.
        prompt_length: [B] int64, the tokens of a row's prompt.
        length: [B] int64, the tokens of the whole row.
        prompt_owner: [B] int64, the row whose packed prompt a row uses (its own, or an earlier one
            with the same prompt).
        row: [N] int64, the row that a packed token was taken from.
        column: [N] int64, the column of a packed token in that row.
    """

    token_index: Tensor
    prompt_length: Tensor
    length: Tensor
    prompt_owner: Tensor
    row: Tensor
    column: Tensor


@dataclass(frozen=True)
class QueryColumns:
    """The queries of each row, if one rank computes a range of the packed tokens.

    The tokens of a row in a range are neighbours in the row, because rows are packed one after
    another, each from its first column on.

    Attributes:
        rows: [b] int64, the rows with a token in the range.
        first, end: [b] int64, the column of a row's first query, and the one behind its last.
    """

    rows: Tensor
    first: Tensor
    end: Tensor

    @staticmethod
    def of(rows: PackedRows, tokens: range) -> QueryColumns:
        """Return the queries among the packed tokens with these indices."""
        # The tokens 3 to 7 of the example: row 0 has token 3 (column 3), row 1 has token 4
        # (column 2), row 2 has tokens 5 6 7 (columns 0 to 2):
        #
        #   rows 0 1 2     first 3 2 0     end 4 3 3
        own = rows.row[tokens.start : tokens.stop]
        found, counts = torch.unique_consecutive(own, return_counts=True)
        starts = counts.cumsum(0) - counts
        first = rows.column[tokens.start : tokens.stop][starts]
        return QueryColumns(found, first, first + counts)


def query_blocks(rows: PackedRows, tokens: range) -> AttentionBlocks:
    """Arrange a range of the packed tokens as queries against their whole rows.

    The queries have their index in the range; the keys have their packed index.
    """
    queries = QueryColumns.of(rows, tokens)
    slot_of_row = torch.zeros(len(rows.length), dtype=torch.int64)  # of a row's first query
    first_of_row = torch.zeros_like(slot_of_row)
    first_of_row[queries.rows] = queries.first
    blocks, slots = list[AttentionBlock](), 0
    by_length = torch.argsort(queries.end, descending=True, stable=True)
    for chosen in torch.split(by_length, ROWS_PER_BLOCK):
        of_block = queries.rows[chosen]
        block = _query_block(rows, of_block, queries.first[chosen], queries.end[chosen])
        own = (block.queries - tokens.start).clamp(min=0)  # padding has the packed index 0
        blocks.append(replace(block, queries=own))
        width = block.queries.shape[1]
        slot_of_row[of_block] = slots + torch.arange(len(chosen)) * width
        slots += block.queries.numel()
    row, column = (x[tokens.start : tokens.stop] for x in (rows.row, rows.column))
    return AttentionBlocks(tuple(blocks), slot_of_row[row] + column - first_of_row[row])


def whole_row_blocks(rows: PackedRows) -> AttentionBlocks:
    """Arrange all rows in one causal block."""
    tokens = rows.token_index
    slot_of_token = rows.row * tokens.shape[1] + rows.column
    return AttentionBlocks((AttentionBlock(tokens, tokens),), slot_of_token)


def similar_length_blocks(rows: PackedRows) -> AttentionBlocks:
    """Arrange rows or their prompts in causal blocks, and responses in blocks of their own."""
    count = len(rows.prompt_owner)
    numbers = torch.arange(count)
    whole = _cheaper_as_whole_rows(rows)
    # The rows of the causal sequences: each whole row that has a token of its own to compute, and
    # the row from which a shared prompt is taken.
    is_owner, has_response = rows.prompt_owner == numbers, rows.length > rows.prompt_length
    causal_length = torch.where(whole, rows.length, rows.prompt_length)
    causal = ((is_owner | (whole & has_response)) & (causal_length > 0)).nonzero()[:, 0]
    response = (has_response & ~whole).nonzero()[:, 0]

    blocks: list[AttentionBlock] = []
    first_slot = torch.zeros(2, count, dtype=torch.int64)  # of causal sequences, of responses
    slots = 0

    def add(block: AttentionBlock, kind: int, block_rows: Tensor) -> None:
        nonlocal slots
        blocks.append(block)
        first_slot[kind, block_rows] = slots + numbers[: len(block_rows)] * block.queries.shape[1]
        slots += block.queries.numel()

    for block_rows in _split_by_length(causal, causal_length, None):
        tokens = rows.token_index[block_rows, : int(causal_length[block_rows].max())]
        add(AttentionBlock(tokens, tokens), 0, block_rows)
    for block_rows in _split_by_length(response, rows.length, rows.length - rows.prompt_length):
        block = _query_block(
            rows, block_rows, rows.prompt_length[block_rows], rows.length[block_rows]
        )
        add(block, 1, block_rows)

    # A response token in column c is query number c − prompt_length of its row's responses.
    number = rows.column - rows.prompt_length[rows.row]
    in_causal = first_slot[0, rows.row] + rows.column
    in_response = first_slot[1, rows.row] + number
    slot = torch.where((number < 0) | whole[rows.row], in_causal, in_response)
    return AttentionBlocks(tuple(blocks), slot)


def _cheaper_as_whole_rows(rows: PackedRows) -> Tensor:
    """Return [B] bool: whether the rows with this row's prompt take fewer pairs as whole rows.

    The other way is their prompt once, and every response token against its whole row.
    """
    prompt, length = rows.prompt_length, rows.length
    pairs_whole = length * (length + 1) // 2
    pairs_responses = (length - prompt) * length
    groups = torch.zeros_like(length)
    # Of each group: whole rows − responses − the prompt, counted at the row that owns it.
    groups.index_add_(0, rows.prompt_owner, pairs_whole - pairs_responses)
    return (groups - prompt * (prompt + 1) // 2 <= 0)[rows.prompt_owner]


def _split_by_length(chosen: Tensor, keys: Tensor, queries: Tensor | None) -> list[Tensor]:
    """Split rows, in descending order of their keys, into the blocks that cost least.

    Args:
        chosen: [rows] int64, the rows to split.
        keys: [B] int64, the keys of each row.
        queries: [B] int64, the queries of each row. None: keys are queries, attention is causal.
    """
    # Three causal sequences of 400, 100 and 100 tokens:
    #
    #   one block               3 · 400 · 401 / 2                               240 600 pairs
    #   {400} {100 100}         400 · 401 / 2 + 2 · 100 · 101 / 2                90 300 pairs
    #
    # The second way has 8192 pairs more for its second block, and is chosen. `least[j]` is the
    # least cost of the first j rows, and their last block begins at `begin[j]`.
    order = chosen[torch.argsort(keys[chosen], descending=True, stable=True)]
    lengths = keys[order].tolist()
    widths = lengths if queries is None else queries[order].tolist()
    least, begin = [0.0], [0]
    for stop in range(1, len(lengths) + 1):
        best, best_start, width = float("inf"), 0, 0
        for start in range(stop - 1, max(stop - ROWS_PER_BLOCK, 0) - 1, -1):
            length, width = lengths[start], max(width, widths[start])
            pairs = length * (length + 1) / 2 if queries is None else length * width
            cost = least[start] + BLOCK_PAIRS + (stop - start) * pairs
            if cost < best:
                best, best_start = cost, start
        least.append(best)
        begin.append(best_start)
    blocks: list[Tensor] = []
    stop = len(lengths)
    while stop:
        blocks.append(order[begin[stop] : stop])
        stop = begin[stop]
    return blocks[::-1]


def _query_block(
    rows: PackedRows, block_rows: Tensor, start: Tensor, length: Tensor
) -> AttentionBlock:
    """Return the block of the queries from column `start` on, against the first `length` keys."""
    keys = rows.token_index[block_rows, : int(length.max())]
    column = start[:, None] + torch.arange(int((length - start).max()))
    inside = column < length[:, None]
    # `column` can point behind the last key, so it is set to 0 before the gather; padding slots
    # then get index 0.
    queries = keys.gather(1, torch.where(inside, column, 0)) * inside
    mask = column[:, None, :, None] >= torch.arange(keys.shape[1])
    return AttentionBlock(queries, keys, start, mask)
