"""Steps and memory of engines on two replicas of two shards each, on four ranks."""

from __future__ import annotations

import os
from itertools import product

import engine_cases
import optimizer_cases
import torch

RANKS, SHARDS = 4, 2
CUTS = (0, 3, 5, 5, 7)  # first row of each rank; rank 2 has none
NAMES = optimizer_cases.NAMES if optimizer_cases.has_torchao() else ("adamw", "muon")
STEPS_OF = [
    (name, on_host, early) for name, on_host, early in product(NAMES, (False, True), (False, True))
]
"""Optimizer, `offload_policy`, and whether gradients are reduced after each micro-batch."""


def build(folder: str, name: str, on_host: bool, early: bool):
    """Build an engine that makes several micro-batches."""
    return optimizer_cases.build(
        folder, name, "float64", fsdp_size=SHARDS, offload_policy=on_host,
        reduce_each_micro_batch=early, max_tokens_per_micro_batch=24,
    )  # fmt: skip


def skipped(engine, rank: int, rows) -> tuple[float, ...]:
    """Make a step with a loss that is not finite on the last rank.

    Returns:
        the number of ranks that have skipped the step, and of those whose weights have changed.
    """
    damaged = dict(rows)
    if rank == RANKS - 1:
        damaged["weight"] = rows["weight"] * float("nan")
    return engine_cases.skipped_and_changed(engine, damaged)


def rank_main(rank: int, gpt2: str, results: str, port: int) -> None:
    """Make steps with every optimizer, and write what rank 0 has found."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    rows = engine_cases.rows_of(engine_cases.make_batch(), *CUTS[rank : rank + 2])
    stepped = {}
    for case in STEPS_OF:
        engine = build(gpt2, *case)
        norms = optimizer_cases.steps(engine, rows)
        weights = {name: tensor.clone() for name, tensor in engine.state_stream()}
        stepped[case] = norms, weights, skipped(engine, rank, rows)
    if rank == 0:
        torch.save(stepped, results)
    torch.distributed.destroy_process_group()
