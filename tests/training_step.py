"""One training step, after which every weight of a small model differs."""

import torch


def train_once(engine, tokens: int = 10) -> None:
    """Train on four rows of `tokens` tokens, of which three fifths are the response."""
    ids = torch.arange(5, 5 + 4 * tokens).view(4, tokens)
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "response_mask": torch.ones(4, tokens * 3 // 5, dtype=torch.int64),
    }
    engine.train_step(batch, lambda out, rows: (-out["log_probs"].sum(), {}))
