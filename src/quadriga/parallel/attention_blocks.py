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
- prompts and responses apart: the distinct prompts in one causal block, then the response tokens as
  queries against their whole rows, with rows of similar length in one block. The queries of a
  shared prompt are computed once, and there is little padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
# Prompts and responses apart: two blocks, 15 query slots instead of 18.
#
#   block 0: prompts, causal       block 1: responses, longest row first
#   queries = keys                 queries       keys                first_query
#     row 0   0 1 2 *                row 2   8  9 10     5 6 7 8 9 10        3
#     row 2   5 6 7                  row 0   2  3  ·     0 1 2 3 ·  ·        2
#   * column 2 of row 0 belongs      row 1   4  ·  ·     0 1 4 · ·  ·        2
#     to the response; the output
#     of this slot is not read
#
#   slot_of_token  0   1   9  10  12   3   4   5   6   7   8       block 1 starts at slot 6
#
# Query slot j of a row is in column first_query + j and attends to the columns up to its own.
# `mask` of row 0 in block 1 (its query columns are 2, 3 and the padding 4):
#
#   key column        0  1  2  3  4  5
#   query column 2    1  1  1  ·  ·  ·       token 21 attends to 11 12 21
#   query column 3    1  1  1  1  ·  ·       token 22 attends to 11 12 21 22
#   query column 4    1  1  1  1  1  ·       padding: its output is not read

ROWS_PER_BLOCK = 32
"""Rows of one response block. More rows mean fewer kernels and more padding."""


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

    def to(self, device: torch.device) -> AttentionBlock:
        """Return the same block with its tensors on `device`."""
        queries = self.queries.to(device, non_blocking=True)
        if self.first_query is None or self.mask is None:
            return AttentionBlock(queries, queries)
        return AttentionBlock(
            queries,
            self.keys.to(device, non_blocking=True),
            self.first_query.to(device, non_blocking=True),
            self.mask.to(device, non_blocking=True),
        )

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
        blocks = tuple(block.to(device) for block in self.blocks)
        return AttentionBlocks(blocks, self.slot_of_token.to(device, non_blocking=True))


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
        in_prompt: [N] bool, whether a packed token belongs to a prompt.
    """

    token_index: Tensor
    prompt_length: Tensor
    length: Tensor
    prompt_owner: Tensor
    row: Tensor
    column: Tensor
    in_prompt: Tensor


def whole_row_blocks(rows: PackedRows) -> AttentionBlocks:
    """Arrange all rows in one causal block."""
    tokens = rows.token_index
    slot_of_token = rows.row * tokens.shape[1] + rows.column
    return AttentionBlocks((AttentionBlock(tokens, tokens),), slot_of_token)


def prompt_and_response_blocks(
    rows: PackedRows, rows_per_block: int = ROWS_PER_BLOCK
) -> AttentionBlocks:
    """Arrange distinct prompts in one causal block and responses in blocks of similar length."""
    count = len(rows.prompt_owner)
    response_slot = torch.zeros(count, dtype=torch.int64)  # slot of a row's first response token
    prompt_slot = torch.zeros(count, dtype=torch.int64)  # slot of an owner's first prompt token
    blocks = []
    slots = 0

    owners = torch.unique(rows.prompt_owner)
    width = int(rows.prompt_length[owners].max()) if count else 0
    if width:
        tokens = rows.token_index[owners, :width]
        blocks.append(AttentionBlock(tokens, tokens))
        prompt_slot[owners] = torch.arange(len(owners)) * width
        slots = tokens.numel()

    with_response = (rows.length > rows.prompt_length).nonzero()[:, 0]
    by_length = with_response[
        torch.argsort(rows.length[with_response], descending=True, stable=True)
    ]
    for block_rows in torch.split(by_length, rows_per_block) if len(by_length) else ():
        block = _response_block(rows, block_rows)
        blocks.append(block)
        response_slot[block_rows] = slots + torch.arange(len(block_rows)) * block.queries.shape[1]
        slots += block.queries.numel()

    # A response token in column c is query number c − prompt_length of its row.
    in_response = response_slot[rows.row] + rows.column - rows.prompt_length[rows.row]
    slot = torch.where(rows.in_prompt, prompt_slot[rows.row] + rows.column, in_response)
    return AttentionBlocks(tuple(blocks), slot)


def _response_block(rows: PackedRows, block_rows: Tensor) -> AttentionBlock:
    """Return the block with the response tokens of `block_rows` as queries, whole rows as keys."""
    start, length = rows.prompt_length[block_rows], rows.length[block_rows]
    keys = rows.token_index[block_rows, : int(length.max())]
    column = start[:, None] + torch.arange(int((length - start).max()))
    inside = column < length[:, None]
    # `column` can point behind the last key, so it is set to 0 before the gather; padding slots
    # then get index 0.
    queries = keys.gather(1, torch.where(inside, column, 0)) * inside
    mask = column[:, None, :, None] >= torch.arange(keys.shape[1])
    return AttentionBlock(queries, keys, start, mask)
