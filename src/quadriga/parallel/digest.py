"""A cheap fingerprint of a tensor's bits, to see whether two copies of a weight are equal."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22


def tensor_digest(tensor: Tensor) -> int:
    """Sum over elements of (bits × odd number of the place), modulo 2^64, on the tensor's device.

    Equal dtype and bits give equal digests; one changed element, or two that trade places, give
    others. Not for use against an adversary.
    """
    flat = tensor.detach().contiguous().view(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        bits = part.view(_BITS[part.element_size()]).to(torch.int64)
        place = torch.arange(start, start + len(part), device=flat.device)
        total += (bits * (2 * place + 1)).sum()
    return int(total) + flat.numel()
