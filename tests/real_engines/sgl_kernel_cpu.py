"""A stand-in for `sgl_kernel` on machines without a GPU, for the tests of this folder only.

SGLang imports `sgl_kernel` when it runs on a CPU, but the package has no build for CPUs.
`scripts/engines.sh sglang` copies this file as `sgl_kernel.py` into the environment of the tests,
and only if it installs for a CPU. One function is needed to generate; the others belong to
speculative decoding and raise.
"""

from __future__ import annotations

from typing import NoReturn

import torch


def assign_req_to_token_pool_cpu(
    rows: torch.Tensor,
    table: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    locations: torch.Tensor,
    columns: int,
) -> None:
    """Write `locations`, request after request, into `table[row, start:end]` of each request."""
    taken = 0
    for row, first, last in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
        assert last <= columns
        table[row, first:last] = locations[taken : taken + last - first].to(table.dtype)
        taken += last - first


def _absent(name: str) -> object:
    def call(*arguments: object, **named: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: the stand-in of the tests does not have it")

    return call


def __getattr__(name: str) -> object:
    if name.startswith("__") or not name.endswith("_cpu"):
        raise AttributeError(name)
    return _absent(name)
