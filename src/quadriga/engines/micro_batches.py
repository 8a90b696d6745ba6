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


def plan_micro_batches(
    batch: Batch, *, size: int | None, max_tokens: int, share_prompts: bool
) -> list[Tensor]:
    """Row indices of each micro-batch: `size` rows each, or by tokens.

    Every row that has a target is in one of them. Rows whose `response_mask` is empty (groups
    without signal, padding rows) have nothing to compute and are left out. By tokens, a
    micro-batch takes rows until the next would pass `max_tokens`; a longer row stands alone.
    Raises `ConfigError` for a size or budget below 1.
    """
    if max_tokens < 1 or (size is not None and size < 1):
        raise ConfigError(
            f"a micro-batch of {size} rows or {max_tokens} tokens cannot hold anything; "
            "set ppo_micro_batch_size_per_gpu or max_tokens_per_micro_batch to at least 1"
        )
    rows = batch["response_mask"].any(1).nonzero()[:, 0].cpu()
    if not len(rows):
        return []
    order, tokens = _order_and_tokens(batch, rows, share_prompts=share_prompts)
    if size is not None:
        return list(order.split(size))
    parts: list[list[int]] = []
    room = 0
    for row, cost in zip(order.tolist(), tokens.tolist(), strict=True):
        if not parts or cost > room:
            parts.append([])
            room = max_tokens
        parts[-1].append(row)
        room -= cost
    return [torch.tensor(part) for part in parts]


def _order_and_tokens(batch: Batch, rows: Tensor, *, share_prompts: bool) -> tuple[Tensor, Tensor]:
    """`rows` with equal prompts side by side, and the tokens that each adds.

    Where prompts are shared, only the first row of a prompt counts its tokens.
    """
    mask = batch["attention_mask"][rows].bool()
    if not share_prompts:
        return rows, mask.sum(1)
    width = mask.shape[1] - batch["response_mask"].shape[1]
    owner = first_row_with_same_prompt(batch["input_ids"][rows, :width], mask[:, :width])
    owns = owner == torch.arange(len(owner))
    tokens = mask[:, width:].sum(1) + mask[:, :width].sum(1) * owns
    order = torch.argsort(owner, stable=True)
    return rows[order], tokens[order]


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
