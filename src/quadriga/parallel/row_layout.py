"""How packed tokens stand in rows for attention, which alone needs rows.

Shapes: B rows, N packed tokens, L longest row; in a block b rows, Lq query and Lk key columns.

Token i of a row stands in column i, so that padding comes last and is never attended to. The
layout is a list of blocks. Two ways to cut:

- whole rows: one block of all rows, queries and keys the same, plain causal;
- apart: distinct prompts in one causal block; then response tokens as queries against their whole
  rows, rows of similar length together. A prompt's queries are computed once however many rows
  share it, and padding is small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_A_BLOCK = 32


@dataclass(frozen=True)
class AttentionBlock:
    """`queries` [b, Lq], `keys` [b, Lk] int64: packed index in each slot (padding names token 0).

    `first_query` [b] int64: column among the keys where query 0 stands; None: 0 in every row, and
    queries and keys are the same tokens. `seen` [b, 1, Lq, Lk] bool: what a query attends to; None
    where plain causal attention says it.
    """

    queries: Tensor
    keys: Tensor
    first_query: Tensor | None = None
    seen: Tensor | None = None

    def to(self, device: torch.device) -> AttentionBlock:
        """The same block on `device`."""
        queries = self.queries.to(device, non_blocking=True)
        if self.first_query is None or self.seen is None:
            return AttentionBlock(queries, queries)
        return AttentionBlock(
            queries,
            self.keys.to(device, non_blocking=True),
            self.first_query.to(device, non_blocking=True),
            self.seen.to(device, non_blocking=True),
        )

    def window_mask(self, window: int) -> Tensor:
        """[b or 1, 1, Lq, Lk] bool: attend to the last `window` tokens, oneself included."""
        device = self.queries.device
        first = torch.zeros(1, dtype=torch.int64, device=device)
        first = first if self.first_query is None else self.first_query
        query = first[:, None] + torch.arange(self.queries.shape[1], device=device)
        key = torch.arange(self.keys.shape[1], device=device)
        distance = query[:, None, :, None] - key
        return (distance >= 0) & (distance < window)


@dataclass(frozen=True)
class RowLayout:
    """`blocks`, and `slot_of_token` [N] int64: where, among the query slots of all blocks one
    after another, each packed token's output is read."""

    blocks: tuple[AttentionBlock, ...]
    slot_of_token: Tensor

    def to(self, device: torch.device) -> RowLayout:
        """The same layout on `device`."""
        blocks = tuple(block.to(device) for block in self.blocks)
        return RowLayout(blocks, self.slot_of_token.to(device, non_blocking=True))


@dataclass(frozen=True)
class TokenPlaces:
    """Where the tokens of B rows are.

    `token_of_slot` [B, L]: packed index of a row's token in each column; `prompt_length`,
    `length` [B]: tokens of the prompt, of the whole row; `owner` [B]: the row that holds this
    row's prompt; `row`, `column` [N]: of each packed token; `in_prompt` [N] bool.
    """

    token_of_slot: Tensor
    prompt_length: Tensor
    length: Tensor
    owner: Tensor
    row: Tensor
    column: Tensor
    in_prompt: Tensor


def whole_rows(places: TokenPlaces) -> RowLayout:
    """One causal block of all rows."""
    slots = places.token_of_slot
    return RowLayout((AttentionBlock(slots, slots),), places.row * slots.shape[1] + places.column)


def prompts_apart(places: TokenPlaces, rows_a_block: int = ROWS_A_BLOCK) -> RowLayout:
    """Prompts in one causal block, responses against whole rows in blocks of similar length."""
    count = len(places.owner)
    first_slot = torch.zeros(count, dtype=torch.int64)  # of the row's response queries
    prompt_slot = torch.zeros(count, dtype=torch.int64)  # of the prompt's queries, by owner
    blocks = []
    slots = 0

    owners = torch.unique(places.owner)
    width = int(places.prompt_length[owners].max()) if count else 0
    if width:
        tokens = places.token_of_slot[owners, :width]
        blocks.append(AttentionBlock(tokens, tokens))
        prompt_slot[owners] = torch.arange(len(owners)) * width
        slots = tokens.numel()

    answered = (places.length > places.prompt_length).nonzero()[:, 0]
    by_length = answered[torch.argsort(places.length[answered], descending=True, stable=True)]
    for rows in by_length.split(rows_a_block) if len(by_length) else ():
        block = _responses(places, rows)
        blocks.append(block)
        first_slot[rows] = slots + torch.arange(len(rows)) * block.queries.shape[1]
        slots += block.queries.numel()

    response_slot = first_slot[places.row] + places.column - places.prompt_length[places.row]
    slot = torch.where(places.in_prompt, prompt_slot[places.row] + places.column, response_slot)
    return RowLayout(tuple(blocks), slot)


def _responses(places: TokenPlaces, rows: Tensor) -> AttentionBlock:
    start, length = places.prompt_length[rows], places.length[rows]
    keys = places.token_of_slot[rows, : int(length.max())]
    column = start[:, None] + torch.arange(int((length - start).max()))
    inside = column < length[:, None]
    queries = keys.gather(1, torch.where(inside, column, 0)) * inside
    seen = column[:, None, :, None] >= torch.arange(keys.shape[1])
    return AttentionBlock(queries, keys, start, seen)
