"""Count the floating-point operations that a GRPO step needs, and measure the machine's peak."""

from __future__ import annotations

import time
from collections.abc import Mapping

SIDE = 1024
PASSES = 5
"""Forward passes worth of work: generation 1, reference 1, forward and backward of the update 3.
Old log-probabilities come from the update."""


def peak_flops() -> float:
    """Return the FLOP/s of a float32 matrix product with torch's threads: the best of ten."""
    import torch

    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    seconds = []
    for _ in range(12):
        began = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - began)
    return 2 * SIDE**3 / min(seconds[2:])


def useful_flops(record: Mapping[str, float], shape: Mapping[str, int], prompts: int) -> float:
    """Return the operations of one step, with every prompt computed once.

    Args:
        record: the metrics of the step.
        shape: `hidden`, `layers`, `intermediate`, `kv_share` (key-value heads over heads, in
            percent) and `vocab` of the model.
        prompts: of the batch.
    """
    rows = record["batch/sequences"]
    response = record["response_length/mean"]
    prompt = record["batch/tokens"] / rows - response
    hidden, layers = shape["hidden"], shape["layers"]
    attention = hidden * hidden * (2 + 2 * shape["kv_share"] / 100)
    layer = 2 * (attention + 3 * hidden * shape["intermediate"])
    # Scores and weighted values: 4 · hidden for each pair of a token and one that it attends to.
    prompt_tokens, response_tokens = prompts * prompt, rows * response
    pairs = prompt_tokens * prompt / 2 + response_tokens * (prompt + response / 2)
    forward = layers * ((prompt_tokens + response_tokens) * layer + 4 * hidden * pairs)
    forward += response_tokens * 2 * hidden * shape["vocab"]
    return PASSES * forward
