"""Split a rank's rows into micro-batches.

The split changes time and memory, but no gradient (`engines.base.LossFn`). Rows with the same
prompt are neighbours, so that the packed forward pass computes the prompt once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from quadriga.engines.base import Batch
from quadriga.errors import ConfigError, FieldError
from quadriga.parallel.packing import first_row_with_same_prompt
from quadriga.protocol import fields

REQUIRED_FIELDS = (fields.INPUT_IDS, fields.ATTENTION_MASK, fields.RESPONSE_MASK)


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
        max_tokens: a micro-batch takes rows until the next one would exceed this number of computed
            tokens. A row that is longer is a micro-batch of its own.
        share_prompts: whether the forward pass packs rows and computes equal prompts once.
            Otherwise it pads each row to the longest of its micro-batch.

    Raises:
        ConfigError: `size` or `max_tokens` is below 1.
    """
    if max_tokens < 1 or (size is not None and size < 1):
        raise ConfigError(
            f"a micro-batch of {size} rows or {max_tokens} tokens would be empty; set "
            "ppo_micro_batch_size_per_gpu or max_tokens_per_micro_batch to at least 1"
        )
    rows = batch[fields.RESPONSE_MASK].any(1).nonzero()[:, 0].cpu()
    if not len(rows):
        return []
    valid = batch[fields.ATTENTION_MASK][rows].bool().cpu()
    if not share_prompts:
        if size is not None:
            return list(torch.split(rows, size))
        length = valid.sum(1)
        order = torch.argsort(length, descending=True, stable=True)
        counts = _rows_that_fit_padded(length[order].tolist(), max_tokens)
        return list(torch.split(rows[order], counts))
    width = valid.shape[1] - batch[fields.RESPONSE_MASK].shape[1]
    owner = first_row_with_same_prompt(
        batch[fields.INPUT_IDS][rows, :width].cpu(), valid[:, :width]
    )
    order = torch.argsort(owner, stable=True)
    if size is not None:
        return list(torch.split(rows[order], size))
    lengths = zip(
        owner[order].tolist(),
        valid[order, :width].sum(1).tolist(),
        valid[order, width:].sum(1).tolist(),
        strict=True,
    )
    return list(torch.split(rows[order], _rows_that_fit_packed(lengths, max_tokens)))


def _rows_that_fit_packed(rows: Iterable[tuple[int, int, int]], max_tokens: int) -> list[int]:
    """Return the number of rows of each micro-batch of packed rows.

    `rows`: (number of the prompt, tokens of the prompt, tokens of the response) of each row, with
    equal prompts next to each other.
    """
    # Four rows with the prompts A A A B of 4 tokens, responses of 3, 2, 4 and 1 tokens, and
    # max_tokens 12. A prompt counts once in each micro-batch that computes it:
    #
    #   prompt            A        A      A         B
    #   added tokens    4 + 3      2      4       4 + 1
    #   sum               7        9   13 > 12: the third row starts a micro-batch with 4 + 4
    #                                     8     13 > 12: the last row starts a micro-batch with 5
    #
    # Result: 2, 1 and 1 rows of 9, 8 and 5 tokens.
    counts: list[int] = []
    tokens, last_prompt = 0, -1
    for prompt, prompt_tokens, response_tokens in rows:
        added = response_tokens + (prompt_tokens if prompt != last_prompt else 0)
        if not counts or tokens + added > max_tokens:
            counts.append(0)
            tokens, added = 0, prompt_tokens + response_tokens
        counts[-1] += 1
        tokens += added
        last_prompt = prompt
    return counts


def _rows_that_fit_padded(lengths: Iterable[int], max_tokens: int) -> list[int]:
    """Return the number of rows of each micro-batch of padded rows, given in descending length."""
    # Lengths 6 5 2 2 1 with max_tokens 12. The first row of a micro-batch is its longest, and the
    # others are padded to its length: {6 5} computes 2 × 6 = 12 tokens, {2 2 1} 3 × 2 = 6.
    counts: list[int] = []
    longest = 0
    for length in lengths:
        if not counts or (counts[-1] + 1) * longest > max_tokens:
            counts.append(0)
            longest = length
        counts[-1] += 1
    return counts


def select_rows(batch: Batch, rows: Tensor, device: torch.device) -> dict[str, Tensor]:
    """Return the rows of every tensor of `batch`, in the order of `rows`, on `device`."""
    return {name: field[rows].to(device, non_blocking=True) for name, field in batch.items()}


def dummy_batch() -> dict[str, Tensor]:
    """Return one row of two tokens: a rank without rows computes it while other ranks have rows."""
    return {
        fields.INPUT_IDS: torch.zeros(1, 2, dtype=torch.int64),
        fields.ATTENTION_MASK: torch.ones(1, 2, dtype=torch.int64),
        fields.RESPONSE_MASK: torch.ones(1, 1, dtype=torch.int64),
    }
