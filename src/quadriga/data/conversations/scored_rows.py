"""From conversations to the rows that a scalar head is computed on, one score for each.

An engine returns the output of the token *before* each target. To read the output of the last
token, a row gets one more token, the target; nothing before it depends on it. Two conversations of
one prompt, P = 3, R = 3; "." is padding, "t" the target:

                      prompt   response
    input_ids         . p q    a b t         response_mask   0 0 1      read at b
                      . p q    c t .                         0 1 0      read at c

Rows of one prompt are neighbours of one packed micro-batch, which computes the prompt once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quadriga.errors import LengthError
from quadriga.protocol import fields

Conversation = tuple[Sequence[int], Sequence[int]]
"""Token ids of the prompt and of the response. Both together have at least one."""

TARGET = 0
"""The token id of the target. It is an input of the model, so it must be in the vocabulary."""


def scored_rows(
    conversations: Sequence[Conversation], pad_token_id: int, longest: int | None = None
) -> dict[str, Tensor]:
    """Return the fields that an engine reads, [B, P + R] and [B, R] int64.

    Tokens at the end of a conversation that are `pad_token_id` are left out, as transformers does
    it (`models.score_head`).

    Args:
        longest: tokens that the model can compute; None: any number.

    Raises:
        LengthError: a conversation is longer.
    """
    cut = [_without_padding(prompt, response, pad_token_id) for prompt, response in conversations]
    for row, (prompt, response) in enumerate(cut):
        if longest is not None and len(prompt) + len(response) + 1 > longest:
            raise LengthError(
                f"conversation {row} has {len(prompt)} + {len(response)} = "
                f"{len(prompt) + len(response)} tokens of the reward model, which can compute "
                f"{longest - 1}; lower data.max_prompt_length or data.max_response_length"
            )
    width = max((len(prompt) for prompt, _ in cut), default=1)
    length = max((len(response) for _, response in cut), default=0) + 1
    ids = torch.full((len(cut), width + length), TARGET, dtype=torch.int64)
    attention = torch.zeros_like(ids)
    mask = torch.zeros(len(cut), length, dtype=torch.int64)
    for row, (prompt, response) in enumerate(cut):
        first, last = width - len(prompt), width + len(response)
        ids[row, first:last] = torch.tensor([*prompt, *response], dtype=torch.int64)
        attention[row, first : last + 1] = 1
        mask[row, len(response)] = 1
    return {fields.INPUT_IDS: ids, fields.ATTENTION_MASK: attention, fields.RESPONSE_MASK: mask}


def _without_padding(
    prompt: Sequence[int], response: Sequence[int], pad_token_id: int
) -> tuple[list[int], list[int]]:
    """Return the conversation up to its last token that is not padding, and a prompt of one token
    at least."""
    whole = [*prompt, *response]
    end = len(whole)
    while end > 1 and whole[end - 1] == pad_token_id:
        end -= 1
    border = max(1, min(len(prompt), end))
    return whole[:border], whole[border:end]


def at_last_token(scores_B: Tensor, response_tokens_BR: Tensor) -> Tensor:
    """Return [B, R] float32 with the score of each row at its last response token, 0 elsewhere.

    `response_tokens_BR`: 1 for each token of the response, whatever the loss does with it.
    """
    length_B = response_tokens_BR.sum(-1).clamp(min=1)
    placed = torch.zeros(response_tokens_BR.shape, dtype=torch.float32)
    return placed.scatter_(1, (length_B - 1)[:, None], scores_B[:, None].float())
