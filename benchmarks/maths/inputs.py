"""Inputs of the speed comparison. Both sides make them from the same seed; needs numpy only."""

from __future__ import annotations

import numpy as np

ADVANTAGES = ("gae", "reinforce_plus_plus", "grpo", "rloo")
BALANCES = {"balance_1024_to_64": (1024, 64), "balance_4096_to_256": (4096, 256)}
SAMPLES, TOKENS, GROUP = 1024, 2048, 8
GAMMA, LAM = 0.99, 0.95
# Sizes for log-probability and entropy: tokens, vocabulary, hidden size.
LOGIT_TOKENS, VOCABULARY, HIDDEN = 2048, 32768, 256


def advantage_inputs() -> dict[str, np.ndarray]:
    """Return 1024 responses of 1 to 2048 tokens, 8 per prompt, with a reward at the last token."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, TOKENS + 1, SAMPLES)
    mask = (np.arange(TOKENS)[None] < lengths[:, None]).astype(np.int64)
    rewards = np.zeros((SAMPLES, TOKENS), dtype=np.float32)
    rewards[np.arange(SAMPLES), lengths - 1] = rng.normal(size=SAMPLES)
    values = rng.normal(size=(SAMPLES, TOKENS)).astype(np.float32) * mask
    groups = np.array([f"prompt-{i // GROUP}" for i in range(SAMPLES)], dtype=object)
    return {"rewards": rewards, "values": values.astype(np.float32), "mask": mask, "groups": groups}


def balance_lengths(name: str) -> tuple[list[int], int]:
    """Return (token counts of a long-tailed batch, number of partitions)."""
    count, parts = BALANCES[name]
    rng = np.random.default_rng(count)
    return np.clip(rng.lognormal(6.5, 0.8, count), 16, 8192).astype(int).tolist(), parts


def logit_inputs() -> dict[str, np.ndarray]:
    """Return hidden states, head weight, labels, and the advantages of a policy-gradient loss."""
    rng = np.random.default_rng(1)
    return {
        "hidden": rng.normal(size=(LOGIT_TOKENS, HIDDEN)).astype(np.float32),
        "weight": (0.05 * rng.normal(size=(VOCABULARY, HIDDEN))).astype(np.float32),
        "labels": rng.integers(0, VOCABULARY, LOGIT_TOKENS),
        "advantages": rng.normal(size=LOGIT_TOKENS).astype(np.float32),
    }
