"""From items to a batch: padding, positions, object columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quadriga.errors import LengthError
from quadriga.protocol import DataProto


def pad_rows(
    rows: Sequence[Sequence[int]], value: int, length: int, side: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rows` as [B, length] int64, padded with `value` on `side`, and the mask of what is real.

    Raises `LengthError` when a row is longer than `length`.
    """
    padded = np.full((len(rows), length), value, dtype=np.int64)
    mask = np.zeros((len(rows), length), dtype=np.int64)
    for i, row in enumerate(rows):
        if len(row) > length:
            raise LengthError(f"row {i} has {len(row)} tokens, more than the batch's {length}")
        place = slice(length - len(row), length) if side == "left" else slice(0, len(row))
        padded[i, place] = row
        mask[i, place] = 1
    return torch.from_numpy(padded), torch.from_numpy(mask)


def positions(attention_mask: torch.Tensor) -> torch.Tensor:
    """Places of real tokens from 0, [B, T] int64; padding before them is at 0."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def collate_prompts(
    items: Sequence[dict[str, Any]], *, pad_token_id: int, length: int | None = None
) -> DataProto:
    """Prompts as `input_ids`, `attention_mask`, `position_ids` [B, P] int64, left-padded.

    P is `length`, or the longest prompt's. Every other key of the items becomes an object column.
    """
    rows = [item["input_ids"] for item in items]
    ids, mask = pad_rows(rows, pad_token_id, length or max(map(len, rows)), "left")
    return DataProto.from_dict(
        {"input_ids": ids, "attention_mask": mask, "position_ids": positions(mask)},
        object_columns(items, leave_out=("input_ids",)),
    )


def collate_answers(
    items: Sequence[dict[str, Any]],
    *,
    pad_token_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
) -> DataProto:
    """Prompts with answers, laid out as a rollout lays out its own.

    `prompts` [B, P] left-padded, `responses` and `response_mask` [B, R] right-padded, and
    `input_ids`, `attention_mask`, `position_ids` [B, P + R]; all int64. `response_mask` is the
    mask of the loss. Items hold `prompt_ids` and `response_ids`.
    """
    prompts = [item["prompt_ids"] for item in items]
    answers = [item["response_ids"] for item in items]
    prompt_ids, prompt_mask = pad_rows(
        prompts, pad_token_id, prompt_length or max(map(len, prompts)), "left"
    )
    response_ids, response_mask = pad_rows(
        answers, pad_token_id, response_length or max(map(len, answers)), "right"
    )
    attention_mask = torch.cat([prompt_mask, response_mask], dim=1)
    return DataProto.from_dict(
        {
            "prompts": prompt_ids,
            "responses": response_ids,
            "response_mask": response_mask,
            "input_ids": torch.cat([prompt_ids, response_ids], dim=1),
            "attention_mask": attention_mask,
            "position_ids": positions(attention_mask),
        },
        object_columns(items, leave_out=("prompt_ids", "response_ids")),
    )


def object_columns(
    items: Sequence[dict[str, Any]], leave_out: Sequence[str]
) -> dict[str, np.ndarray[Any, Any]]:
    """One object array [B] for every other key; lists and dicts stay whole."""
    columns: dict[str, np.ndarray[Any, Any]] = {}
    for key in items[0]:
        if key not in leave_out:
            column = np.empty(len(items), dtype=object)
            column[:] = [item[key] for item in items]
            columns[key] = column
    return columns
