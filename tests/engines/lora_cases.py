"""Engines with adapters, for the tests of one rank and of spawned ranks."""

from __future__ import annotations

import os

import engine_cases as cases
import torch

from quadriga.config.schema import EngineConfig, LoraConfig, ModelConfig, OptimConfig
from quadriga.engines.fsdp import FSDPEngine

LORA = LoraConfig(rank=3, alpha=8.0)
SEED = 11


def build(folder: str, lora: LoraConfig = LORA, *, dtype="float32", head="lm", **settings):
    """Build an engine that trains adapters; equal on every rank and in every process."""
    torch.manual_seed(SEED)
    freeze = settings.pop("freeze", ())
    optim = settings.pop("optim", OptimConfig(lr=0.01))
    return FSDPEngine(
        ModelConfig(path=folder, lora=lora, freeze=freeze),
        EngineConfig(dtype=dtype, **settings.pop("engine", {})),
        optim,
        head=head,
        total_steps=8,
        **settings,
    )


def weights(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.state_stream()}


def ranks_main(rank: int, folder: str, work: str, port: int) -> None:
    """Make two steps on two ranks, with a layer of its own as unit; save, and load one rank's."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    batch = cases.make_batch()
    rows = cases.rows_of(batch, 0, 4) if rank == 0 else cases.rows_of(batch, 4, 7)
    engine = build(folder, min_unit_parameters=1)
    first = weights(engine)
    for _ in range(2):
        cases.step(engine, rows)
    found = weights(engine)
    off = engine.without_adapters().forward(batch)["log_probs"]
    engine.save(f"{work}/two_ranks")
    resumed = build(folder)
    resumed.load(f"{work}/one_rank")
    loaded = weights(resumed)
    if rank == 0:
        torch.save({"first": first, "after": found, "off": off, "loaded": loaded}, f"{work}/found")
    torch.distributed.destroy_process_group()
