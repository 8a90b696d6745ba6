"""Count the floating-point operations that a GRPO step needs, and measure the machine's peak."""

from __future__ import annotations

import time
from collections.abc import Mapping

from sizes import Size

SIDE = 1024
DEVICE_SIDE = 8192
PASSES = 5
"""Forward passes worth of work: generation 1, reference 1, forward and backward of the update 3.
Old log-probabilities come from the update."""


def peak_flops(device: str) -> float:
    """Return the FLOP/s of a matrix product, the best of ten: on a CPU in float32 with torch's
    threads, the faster of torch's own choice and oneDNN, which linear layers use; on an accelerator
    in bfloat16."""
    import torch
    from torch import nn

    from quadriga.models.cpu_linear import use_cpu_linear

    on_cpu = device == "cpu"
    side, dtype = (SIDE, torch.float32) if on_cpu else (DEVICE_SIDE, torch.bfloat16)
    a = torch.randn(side, side, dtype=dtype, device=device)
    layers = [nn.Sequential(nn.Linear(side, side, bias=False, dtype=dtype, device=device))
              for _ in range(2 if on_cpu else 1)]  # fmt: skip
    if on_cpu:
        use_cpu_linear(layers[-1])
    seconds = []
    with torch.no_grad():
        for layer in layers:
            for run in range(12):
                began = time.perf_counter()
                layer(a)
                if not on_cpu:
                    getattr(torch, device).synchronize()
                if run >= 2:  # the first two warm up
                    seconds.append(time.perf_counter() - began)
    return 2 * side**3 / min(seconds)


def useful_flops(record: Mapping[str, float], size: Size, prompts: int) -> float:
    """Return the operations of one step, with every prompt computed once.

    Args:
        record: the metrics of the step.
        size: of the model.
        prompts: of the batch.
    """
    rows = record["batch/sequences"]
    response = record["response_length/mean"]
    prompt = record["batch/tokens"] / rows - response
    hidden, layers = size.hidden, size.layers
    attention = hidden * hidden * (2 + 2 * size.kv_heads / size.heads)
    layer = 2 * (attention + 3 * hidden * size.intermediate)
    # Scores and weighted values: 4 · hidden for each pair of a token and one that it attends to.
    prompt_tokens, response_tokens = prompts * prompt, rows * response
    pairs = prompt_tokens * prompt / 2 + response_tokens * (prompt + response / 2)
    forward = layers * ((prompt_tokens + response_tokens) * layer + 4 * hidden * pairs)
    forward += response_tokens * 2 * hidden * size.vocab
    return PASSES * forward
