"""The bytes of optimizer states, for the memory plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from quadriga.config.schema import OptimizerName
from quadriga.engines.optimizers.adamw import MOMENTS
from quadriga.engines.optimizers.adamw_8bit import block_size


def state_bytes(rule: OptimizerName, shape: Sequence[int], rows: int, dtype: torch.dtype) -> int:
    """Return the bytes of the state of `rows` rows of a parameter.

    Args:
        shape: of the whole parameter.
        dtype: of the parameter.
    """
    # A matrix [1024, 4096] in float32: AdamW has two moments of 16 MiB. Muon has one. With 8 bits
    # a moment has 4 MiB of codes, and 16 scales of 4 bytes in each of 1024 rows: 64 KiB.
    row = math.prod(shape[1:])
    if rule == "muon":
        return rows * row * dtype.itemsize
    block = block_size(shape) if rule == "adamw_8bit" else None
    if block is None:
        return len(MOMENTS) * rows * row * dtype.itemsize
    return len(MOMENTS) * rows * (row + row // block * torch.float32.itemsize)
