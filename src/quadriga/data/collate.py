"""Combine the items of a dataset into a batch: padding, positions, object arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quadriga.data.chat import Chat, Conversation
from quadriga.data.images import PromptImages
from quadriga.errors import LengthError
from quadriga.protocol import DataProto, fields
from quadriga.protocol.values import object_array


class PromptItem(TypedDict):
    """One prompt of a `PromptDataset`.

    `index` is the number of the row in all files together. The three behind it come from the row
    and are None if it does not have them. For a model that takes images, every item has the last.
    """

    input_ids: list[int]
    raw_prompt: Chat
    index: int
    data_source: object
    reward_model: object
    extra_info: object
    multi_modal_inputs: NotRequired[PromptImages]


class SFTItem(TypedDict):
    """One conversation of an `SFTDataset`: the tokens before the first that the assistant wrote,
    those from there on, and which of the latter the assistant wrote (1)."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]


def pad_rows(
    rows: Sequence[Sequence[int]], value: int, length: int, side: Literal["left", "right"]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad `rows` with `value` on `side`; return the rows and a mask, both [B, length] int64.

    Raises `LengthError` if a row is longer than `length`.
    """
    padded = np.full((len(rows), length), value, dtype=np.int64)
    mask = np.zeros((len(rows), length), dtype=np.int64)
    for i, row in enumerate(rows):
        if len(row) > length:
            raise LengthError(f"row {i} has {len(row)} tokens, more than the length {length}")
        columns = slice(length - len(row), length) if side == "left" else slice(0, len(row))
        padded[i, columns] = row
        mask[i, columns] = 1
    return torch.from_numpy(padded), torch.from_numpy(mask)


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Return the position of each token, [B, T] int64, counted from 0 without padding.

    Padding on the left has position 0; padding on the right repeats the last position:

        mask       0 0 1 1 1 0
        cumsum     0 0 1 2 3 3
        position   0 0 0 1 2 2
    """
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def collate_prompts(
    items: Sequence[PromptItem], *, pad_token_id: int, length: int | None = None
) -> DataProto:
    """Return a batch of prompts: `input_ids`, `attention_mask`, `position_ids` [B, P] int64.

    Prompts are padded on the left to P = `length`, or to the longest prompt. Every other key of the
    items becomes an object array. For a model that takes images, `position_ids` is [B, 3, P], and
    `multi_modal_inputs` has the patches of the images of each row, {} without images.

    Raises:
        LengthError: a prompt is longer than `length`.
        DataError: an image cannot be read any more.
    """
    rows = [item[fields.INPUT_IDS] for item in items]
    ids, mask = pad_rows(rows, pad_token_id, length or max(map(len, rows)), "left")
    tensors = {
        fields.INPUT_IDS: ids,
        fields.ATTENTION_MASK: mask,
        fields.POSITION_IDS: positions(mask),
    }
    arrays = object_arrays(items, leave_out=(fields.INPUT_IDS, fields.MULTI_MODAL_INPUTS))
    images = [
        item[fields.MULTI_MODAL_INPUTS] for item in items if fields.MULTI_MODAL_INPUTS in item
    ]
    if images:
        inputs = [image.inputs() for image in images]
        arrays |= object_arrays([{fields.MULTI_MODAL_INPUTS: entry} for entry in inputs], ())
        of_rows = [image.positions(entry) for image, entry in zip(images, inputs, strict=True)]
        tensors[fields.POSITION_IDS] = _padded_positions(of_rows, ids.shape[1])
    return DataProto.from_dict(tensors, arrays)


def _padded_positions(rows: Sequence[npt.NDArray[np.int64]], length: int) -> torch.Tensor:
    """Pad positions [3, tokens] of each row with 0 on the left; return them, [B, 3, length]."""
    padded = np.zeros((len(rows), 3, length), dtype=np.int64)
    for i, row in enumerate(rows):
        padded[i, :, length - row.shape[1] :] = row
    return torch.from_numpy(padded)


def collate_answers(
    items: Sequence[SFTItem],
    *,
    pad_token_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
) -> DataProto:
    """Return a batch of conversations, with the columns that a rollout produces.

    `prompts` [B, P] are padded on the left, `responses` and `response_mask` [B, R] on the right.
    `input_ids`, `attention_mask` and `position_ids` are [B, P + R]. All are int64. The loss is
    computed where `response_mask` is 1: at the tokens of the assistant.

    With P = 3, R = 4, and "." for padding; u is a token of the user between two answers:

        prompt p q, answer a               . p q a . . .       response_mask   1 0 0 0
        prompt r s t, answers b and c d    r s t b u c d                       1 0 1 1
    """
    prompts = [item["prompt_ids"] for item in items]
    answers = [item["response_ids"] for item in items]
    masks = [item["response_mask"] for item in items]
    prompt_ids, prompt_mask = pad_rows(
        prompts, pad_token_id, prompt_length or max(map(len, prompts)), "left"
    )
    length = response_length or max(map(len, answers))
    response_ids, present = pad_rows(answers, pad_token_id, length, "right")
    response_mask, _ = pad_rows(masks, 0, length, "right")
    attention_mask = torch.cat([prompt_mask, present], dim=1)
    return DataProto.from_dict(
        {
            fields.PROMPTS: prompt_ids,
            fields.RESPONSES: response_ids,
            fields.RESPONSE_MASK: response_mask,
            fields.INPUT_IDS: torch.cat([prompt_ids, response_ids], dim=1),
            fields.ATTENTION_MASK: attention_mask,
            fields.POSITION_IDS: positions(attention_mask),
        },
        object_arrays(items, leave_out=("prompt_ids", "response_ids", "response_mask")),
    )


def object_arrays(
    items: Sequence[Mapping[str, object]], leave_out: Sequence[str]
) -> dict[str, npt.NDArray[np.object_]]:
    """Return one object array [B] per key of the items, except those in `leave_out`."""
    arrays: dict[str, npt.NDArray[np.object_]] = {}
    for key in items[0]:
        if key not in leave_out:
            arrays[key] = object_array([item[key] for item in items])
    return arrays


TARGET = 0
"""The token id of the target. It is an input of the model, so it must be in the vocabulary."""


def scored_rows(
    conversations: Sequence[Conversation], pad_token_id: int, longest: int | None = None
) -> dict[str, Tensor]:
    """Return the fields that an engine reads, [B, P + R] and [B, R] int64.

    Tokens at the end of a conversation that are `pad_token_id` are left out, as transformers does
    it (`models.loading`).

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
