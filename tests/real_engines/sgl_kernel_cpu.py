"""A stand-in for `sgl_kernel` on machines without a GPU, for the tests of this folder only.

SGLang imports `sgl_kernel` when it runs on a CPU, but the package has no build for CPUs.
`scripts/engines.sh sglang` copies this file as `sgl_kernel.py` into the environment of the tests,
and only if it installs for a CPU. One function is needed to generate, and one operation for seeds;
the others belong to speculative decoding and raise.
"""

from typing import NoReturn

import numpy as np
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


@torch.library.custom_op("sgl_kernel::murmur_hash32_cpu", mutates_args=())
def murmur_hash32_cpu(
    seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """Return [n, m] uint32: MurmurHash3 of (seed, 64 bits; position, 32; column, 32)."""
    seeds = seed.view(torch.int64).numpy().view(np.uint64)[:, None]
    blocks = (
        seeds & 0xFFFFFFFF,
        seeds >> np.uint64(32),
        positions.numpy().astype(np.uint64)[:, None],
        columns.numpy().astype(np.uint64)[None, :],
    )
    state = np.zeros((1, 1), dtype=np.uint64)
    for block in blocks:
        mixed = _rotated(_product(block, 0xCC9E2D51), 15)
        state = _rotated(state ^ _product(mixed, 0x1B873593), 13)
        state = (state * np.uint64(5) + np.uint64(0xE6546B64)) & np.uint64(0xFFFFFFFF)
    state = state ^ np.uint64(16)  # the length in bytes
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = _product(state ^ (state >> np.uint64(shift)), factor)
    state = state ^ (state >> np.uint64(16))
    return torch.from_numpy(state.astype(np.uint32))


@murmur_hash32_cpu.register_fake
def _(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return seed.new_empty((len(seed), len(columns)), dtype=torch.uint32)


def _product(numbers: np.ndarray, factor: int) -> np.ndarray:
    return (numbers * np.uint64(factor)) & np.uint64(0xFFFFFFFF)


def _rotated(numbers: np.ndarray, bits: int) -> np.ndarray:
    left = (numbers << np.uint64(bits)) & np.uint64(0xFFFFFFFF)
    return left | (numbers >> np.uint64(32 - bits))


def _absent(name: str) -> object:
    def call(*arguments: object, **named: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: the stand-in of the tests does not have it")

    return call


def __getattr__(name: str) -> object:
    if name.startswith("__") or not name.endswith("_cpu"):
        raise AttributeError(name)
    return _absent(name)
