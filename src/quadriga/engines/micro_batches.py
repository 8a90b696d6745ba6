"""Split a rank's rows into micro-batches.

The split changes time and memory, but no gradient (`engines.base.LossFn`). Rows with the same
prompt are neighbours, so that the packed forward pass computes the prompt once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quadriga.engines.base import Batch
from quadriga.errors import ConfigError, FieldError
from quadriga.parallel.packing import first_row_with_same_prompt

REQUIRED_FIELDS = ("input_ids", "attention_mask", "response_mask")


def check_fields(batch: Batch) -> None:
    """Raise `FieldError` if the batch lacks a field that every forward pass needs."""
    for name in REQUIRED_FIELDS:
        if name not in batch:
            raise FieldError(
                f"a training engine needs the field {name!r}; the batch has {sorted(batch)}",
                field=name,
            )


def plan_micro_batches(
    batch: Batch, *, size: int | None, max_tokens: int, share_prompts: bool
) -> list[Tensor]:
    """Return the row indices of each micro-batch.

    Every row with a target is in exactly one micro-batch. Rows whose `response_mask` is all 0
    (prompt groups without an advantage, padding rows) need no computation and are left out.

    Args:
        size: rows of a micro-batch. None: split by tokens.
        max_tokens: a micro-batch takes rows until the next one would exceed this number. A row that
            is longer is a micro-batch of its own.
        share_prompts: whether the forward pass computes equal prompts once.

    Raises:
        ConfigError: `size` or `max_tokens` is below 1.
    """
    if max_tokens < 1 or (size is not None and size < 1):
        raise ConfigError(
            f"a micro-batch of {size} rows or {max_tokens} tokens would be empty; set "
            "ppo_micro_batch_size_per_gpu or max_tokens_per_micro_batch to at least 1"
        )
    rows = batch["response_mask"].any(1).nonzero()[:, 0].cpu()
    if not len(rows):
        return []
    order, tokens = _order_and_tokens(batch, rows, share_prompts=share_prompts)
    if size is not None:
        return list(torch.split(order, size))
    # Three rows with prompts A B A of 4 tokens and responses of 3, 5 and 2 tokens, max_tokens 12:
    #
    #   order               0 (A)   2 (A)   1 (B)
    #   added tokens        4 + 3     2     4 + 5      the prompt A counts once
    #   tokens left of 12     5       3     9 > 3      so row 1 starts the next micro-batch
    #
    # Result: rows 0 2 and row 1.
    micro_batches: list[list[int]] = []
    tokens_left = 0
    for row, added in zip(order.tolist(), tokens.tolist(), strict=True):
        if not micro_batches or added > tokens_left:
            micro_batches.append([])
            tokens_left = max_tokens
        micro_batches[-1].append(row)
        tokens_left -= added
    return [torch.tensor(micro_batch) for micro_batch in micro_batches]


def _order_and_tokens(batch: Batch, rows: Tensor, *, share_prompts: bool) -> tuple[Tensor, Tensor]:
    """Return `rows` with equal prompts next to each other, and the tokens that each row adds.

    If prompts are shared, only the first row with a prompt counts the prompt's tokens.
    """
    mask = batch["attention_mask"][rows].bool()
    if not share_prompts:
        return rows, mask.sum(1)
    width = mask.shape[1] - batch["response_mask"].shape[1]
    owner = first_row_with_same_prompt(batch["input_ids"][rows, :width], mask[:, :width])
    is_owner = owner == torch.arange(len(owner))
    tokens = mask[:, width:].sum(1) + mask[:, :width].sum(1) * is_owner
    order = torch.argsort(owner, stable=True)
    return rows[order], tokens[order]


def select_rows(batch: Batch, rows: Tensor, device: torch.device) -> dict[str, Tensor]:
    """Return the rows of every tensor of `batch`, in the order of `rows`, on `device`."""
    return {name: field[rows].to(device, non_blocking=True) for name, field in batch.items()}


def dummy_batch() -> dict[str, Tensor]:
    """Return one row of two tokens: a rank without rows computes it while other ranks have rows."""
    return {
        "input_ids": torch.zeros(1, 2, dtype=torch.int64),
        "attention_mask": torch.ones(1, 2, dtype=torch.int64),
        "response_mask": torch.ones(1, 1, dtype=torch.int64),
    }
