"""One training step, after which every weight of a small model differs."""

from __future__ import annotations

import torch


def train_once(engine) -> None:
    ids = torch.arange(5, 45).view(4, 10)
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "response_mask": torch.ones(4, 6, dtype=torch.int64),
    }
    engine.train_step(batch, lambda out, rows: (-out["log_probs"].sum(), {}))
