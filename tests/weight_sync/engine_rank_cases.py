"""Weight syncs from a real training engine on two processes to the hf rollout of each."""

from __future__ import annotations

import torch
from rank_cases import end, start

from quadriga.config.schema import EngineConfig, LoraConfig, ModelConfig, OptimConfig
from quadriga.engines.fsdp import FSDPEngine
from quadriga.rollout import build_rollout
from quadriga.weight_sync import WeightSync
from training_step import train_once


def rank_main(rank: int, ranks: int, folder: str, work: str, port: int) -> None:
    start(rank, ranks, port)
    found = {
        "plain": engine_sync(folder, LoraConfig()),
        "adapters": engine_sync(folder, LoraConfig(rank=3)),
    }
    end(rank, work, found)


def engine_sync(folder, lora):
    """Sync a model that made a step; return (largest difference, tensors that were not sent, bytes
    that this rank received, bytes of all names, version)."""
    torch.manual_seed(0)
    model = ModelConfig(path=folder, lora=lora)
    engine = FSDPEngine(
        model, EngineConfig(), OptimConfig(lr=0.01), min_unit_parameters=1, total_steps=4
    )
    train_once(engine)
    rollout = build_rollout("hf", ModelConfig(path=folder))
    sync = WeightSync(engine, rollout, bucket_bytes=4096)
    report = sync.run(3)
    held = rollout.module.state_dict()
    sent = dict(engine.state_stream())
    assert sent.keys() == held.keys()
    largest = max(float((sent[name] - held[name]).abs().max()) for name in held)
    received = report.traffic.received
    return largest, report.tensors - len(held), received, report.num_bytes, rollout.version
