"""Cutting a rank's rows into micro-batches. The cut never changes a gradient, only time and memory.

Rows with the same prompt stay side by side, so that the packed forward can share it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quadriga.engines.base import Batch
from quadriga.errors import ConfigError, FieldError
from quadriga.parallel.packing import first_row_with_same_prompt

NEEDED = ("input_ids", "attention_mask", "response_mask")


def check_fields(batch: Batch) -> None:
    """Raise `FieldError` when the batch lacks a field that every forward needs."""
    for name in NEEDED:
        if name not in batch:
            raise FieldError(
                f"a training engine needs the field {name!r}; the batch has {sorted(batch)}",
                field=name,
            )


def row_costs(batch: Batch, *, share_prompts: bool) -> tuple[list[int], list[int]]:
    """(order, tokens): rows with equal prompts side by side, and the tokens each row adds.

    A row whose prompt an earlier row of `order` has adds its response only, where prompts are
    shared.
    """
    mask = batch["attention_mask"].bool()
    width = mask.shape[1] - batch["response_mask"].shape[1]
    if not share_prompts:
        return list(range(len(mask))), mask.sum(1).tolist()
    owner = first_row_with_same_prompt(batch["input_ids"][:, :width], mask[:, :width])
    tokens = mask[:, width:].sum(1)
    owns = owner == torch.arange(len(owner))
    tokens = tokens + mask[:, :width].sum(1) * owns
    return torch.argsort(owner, stable=True).tolist(), tokens.tolist()


def plan_micro_batches(
    batch: Batch, *, size: int | None, max_tokens: int, share_prompts: bool
) -> list[Tensor]:
    """Row indices of each micro-batch, every row once: `size` rows each, or by tokens.

    By tokens, a micro-batch takes rows until the next would pass `max_tokens`; a row longer than
    that stands alone. Raises `ConfigError` for a size or budget below 1.
    """
    if max_tokens < 1 or (size is not None and size < 1):
        raise ConfigError(
            f"a micro-batch of {size} rows or {max_tokens} tokens cannot hold anything; "
            "set ppo_micro_batch_size_per_gpu or max_tokens_per_micro_batch to at least 1"
        )
    if not len(batch["input_ids"]):
        return []
    order, tokens = row_costs(batch, share_prompts=share_prompts)
    if size is not None:
        return list(torch.tensor(order).split(size))
    parts: list[list[int]] = []
    room = 0
    for row in order:
        if not parts or tokens[row] > room:
            parts.append([])
            room = max_tokens
        parts[-1].append(row)
        room -= tokens[row]
    return [torch.tensor(part) for part in parts]


def take_rows(batch: Batch, rows: Tensor, device: torch.device) -> dict[str, Tensor]:
    """The rows of every tensor of `batch`, in the order of `rows`, on `device`."""
    return {name: field[rows].to(device, non_blocking=True) for name, field in batch.items()}


def filler_batch() -> dict[str, Tensor]:
    """One row of two tokens: what a rank computes when it has no rows left but others have."""
    return {
        "input_ids": torch.zeros(1, 2, dtype=torch.int64),
        "attention_mask": torch.ones(1, 2, dtype=torch.int64),
        "response_mask": torch.ones(1, 1, dtype=torch.int64),
    }
