"""Count the floating-point operations that a GRPO step needs, and measure the machine's peak."""

from __future__ import annotations

import time
from collections.abc import Mapping

SIDE = 1024
PASSES = 5
"""Forward passes worth of work: generation 1, reference 1, forward and backward of the update 3.
Old log-probabilities come from the update."""


def peak_flops() -> float:
    """Return the FLOP/s of a float32 matrix product with torch's threads: the best of ten of each
    library, torch's own choice and, if torch has it, oneDNN, which linear layers use."""
    import torch
    from torch import nn

    from quadriga.models.cpu_linear import use_cpu_linear

    a = torch.randn(SIDE, SIDE)
    by_torch, by_onednn = (nn.Sequential(nn.Linear(SIDE, SIDE, bias=False)) for _ in range(2))
    use_cpu_linear(by_onednn)
    seconds = []
    with torch.no_grad():
        for layer in (by_torch, by_onednn):
            for run in range(12):
                began = time.perf_counter()
                layer(a)
                if run >= 2:  # the first two warm up
                    seconds.append(time.perf_counter() - began)
    return 2 * SIDE**3 / min(seconds)


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
