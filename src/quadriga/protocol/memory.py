"""Fresh host memory for tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

HUGE_BYTES = 4 * 2**20
"""From here on numpy asks the kernel for huge pages."""
_ALIGNMENT = 64  # as torch allocates


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor.

    Large ones are allocated by numpy, which asks for huge pages: fresh memory costs a fault a page,
    and with small pages the faults take several times as long as filling the memory does.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < HUGE_BYTES:
        return torch.empty(tuple(shape), dtype=dtype)
    memory = np.empty(nbytes + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    flat = torch.from_numpy(memory[start : start + nbytes])
    return flat.view(dtype).view(tuple(shape))


def is_plain(tensor: torch.Tensor) -> bool:
    """A dense CPU tensor without gradient: one whose result may be written into such memory."""
    return (
        tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad and torch.is_grad_enabled())
        and type(tensor) is torch.Tensor
    )
