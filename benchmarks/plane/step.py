"""The work of the five-call step: trivial computation on tensors of realistic sizes.

It imports only torch, so that all systems run the same code.
"""

from __future__ import annotations

import torch

TOKENS = 1024
ROW_BYTES = 32 * TOKENS  # three int64 [T], one int64 [T/2], two float32 [T/2]


def rows_for(megabytes: int, ranks: int) -> int:
    """Return the number of rows of a batch of that size, a multiple of the number of ranks."""
    rows = megabytes * 2**20 // ROW_BYTES
    return max(rows // ranks, 1) * ranks


def rollout(rows: int) -> dict[str, torch.Tensor]:
    """Return the fields that generation produces for `rows` prompts."""
    ids = torch.full((rows, TOKENS), 7, dtype=torch.int64)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones(rows, TOKENS, dtype=torch.int64),
        "position_ids": torch.arange(TOKENS).repeat(rows, 1),
        "responses": ids[:, TOKENS // 2 :].contiguous(),
    }


def log_prob(responses: torch.Tensor) -> dict[str, torch.Tensor]:
    """Read the responses and return a float field of their shape."""
    return {"old_log_probs": responses.float().neg_()}


def values(responses: torch.Tensor) -> dict[str, torch.Tensor]:
    """Read the responses and return a float field of their shape."""
    return {"values": responses.float()}


FIELDS = ("input_ids", "attention_mask", "position_ids", "responses", "old_log_probs", "values")


def update(fields: list[torch.Tensor]) -> float:
    """Read every byte of every field."""
    return float(sum(float(field.sum()) for field in fields))
