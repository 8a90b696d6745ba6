"""Weight syncs on real gloo processes; each process writes what it found for the test to read."""

import pickle
from pathlib import Path

import torch
import torch.distributed as dist
from fakes import Source, Target
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from quadriga.config.schema import EngineConfig, LoraConfig, ModelConfig, OptimConfig
from quadriga.engines.fsdp import FSDPEngine
from quadriga.errors import WorkerError
from quadriga.parallel.distributed import init_distributed
from quadriga.parallel.layouts import slices
from quadriga.rollout import build_rollout
from quadriga.rollout.base import tensor_digest
from quadriga.weight_sync.sync import WeightSync
from training_step import train_once


class ShardedTarget(Target):
    """Ranks that hold one copy together: a part of each weight's first dimension that divides."""

    def __init__(self, weights, group, change=None):
        super().__init__(weights)
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.order = []
        self.change = change or (lambda name, part: part)
        self.held = {name: self.weights[name][slices(box)].clone() for name, box in self.boxes()}

    def boxes(self):
        for name, weight in self.weights.items():
            if weight.ndim and len(weight) % self.size == 0:
                step = len(weight) // self.size
                rows = (self.rank * step, self.rank * step + step)
                yield name, (rows, *((0, size) for size in weight.shape[1:]))

    def weight_boxes(self):
        return dict(self.boxes())

    def update_weights(self, stream, version, form):
        assert form == "parts"
        for name, part in stream:
            part = self.change(name, part)
            self.held.get(name, self.weights[name]).copy_(part)
            self.order.append((name, part.numel()))
        self.version = version

    def weights_digest(self):
        for name, part in self.held.items():
            parts = [torch.empty_like(part) for _ in range(self.size)]
            dist.all_gather(parts, part, group=self.group)
            self.weights[name].copy_(torch.cat(parts))
        return super().weights_digest()


def model_weights():
    torch.manual_seed(0)
    return {
        "embed": torch.randn(13, 6),
        "flags": torch.randint(0, 99, (5,), dtype=torch.uint8),
        "norm": torch.randn(6, dtype=torch.bfloat16),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "wide": torch.randn(7, 33),
        "large": torch.randn(64, 40),
        "double": torch.randn(3, 5, dtype=torch.float64),
    }


def sharded(weights, mesh, placements):
    return {
        name: distribute_tensor(w.clone(), mesh, [p if w.ndim else Replicate() for p in placements])
        for name, w in weights.items()
    }


def rank_main(rank: int, ranks: int, work: str) -> None:
    """Everything that needs real processes, in one start of them."""
    init_distributed(timeout_s=60)
    found = {"syncs": syncs(ranks)}
    flat = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    found["divided"] = divided(rank, flat)
    write(rank, work, found)


def divided(rank: int, mesh):
    """Sync to copies that two ranks hold together, each of neighbours or with strides."""
    found = {}
    weights = model_weights()
    for name, groups in {"neighbours": [[0, 1], [2, 3]], "strides": [[0, 2], [1, 3]]}.items():
        made = [dist.new_group(group) for group in groups]
        own = next(g for g, ranks in zip(made, groups, strict=True) if rank in ranks)
        target = ShardedTarget(weights, own)
        sync = WeightSync(Source(sharded(weights, mesh, [Shard(0)])), target, bucket_bytes=256)
        reports = [sync.run(version)["group"] for version in (1, 2)]
        digests = target.weights_digest()
        equal = all(digests[n] == tensor_digest(w) for n, w in weights.items())
        sizes = {n: w[slices(target.weight_boxes().get(n, ()))].numel() for n, w in weights.items()}
        found[name] = equal, dict(target.order) == sizes, reports[1]
        large = target.weight_boxes()["large"][0]
        found[name] += (large[0] <= 16 * rank < large[1],)
    wrong = ShardedTarget(weights, own, change=lambda n, w: w + 1 if n == "large" else w)
    try:
        WeightSync(Source(sharded(weights, mesh, [Shard(0)])), wrong).run(1)
    except WorkerError as error:
        found["wrong"] = error.tensors
    return found


def write(rank: int, work: str, found: object) -> None:
    """Write what this rank found."""
    Path(work, f"rank_{rank}.pickle").write_bytes(pickle.dumps(found))


def syncs(ranks: int):
    """Sync from several meshes by both channels; the second sync of each after a change."""
    flat = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    square = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    weights = model_weights()
    sources = {
        "hybrid": (square, [Replicate(), Shard(0)]),
        "two dimensions": (square, [Shard(0), Shard(0)]),
        "whole": (flat, [Replicate()]),
    }
    found = {}
    for name, (mesh, placements) in sources.items():
        for bucket in (256, 1 << 20) if name == "hybrid" else (256,):
            source = Source(sharded(weights, mesh, placements), {"embed": "head"})
            target = Target({**weights, "head": weights["embed"]})
            sync = WeightSync(source, target, bucket_bytes=bucket)
            sync.run(1)
            for weight in source.weights.values():
                weight.add_(1)
            report = sync.run(2).get("group", 0)
            whole = {n: w + 1 for n, w in weights.items()}
            equal = all(torch.equal(target.weights[n], w) for n, w in whole.items())
            tied = torch.equal(target.weights["head"], whole["embed"])
            found[name, bucket] = (equal, tied, report, sync._plan)
    return found


def engine_main(rank: int, ranks: int, folder: str, work: str) -> None:
    """Weight syncs from a real training engine to the hf rollout of each process."""
    found = {
        "plain": engine_sync(folder, LoraConfig()),
        "adapters": engine_sync(folder, LoraConfig(rank=3)),
    }
    write(rank, work, found)


def engine_sync(folder, lora):
    """Sync a model that made a step; return (largest difference, bytes that this rank received,
    bytes of all names, version)."""
    torch.manual_seed(0)
    model = ModelConfig(path=folder, lora=lora)
    engine = FSDPEngine(
        model, EngineConfig(), OptimConfig(lr=0.01), min_unit_parameters=1, total_steps=4
    )
    train_once(engine)
    rollout = build_rollout("hf", ModelConfig(path=folder))
    received = WeightSync(engine, rollout, bucket_bytes=4096).run(3)["group"]
    held, sent = rollout.module.state_dict(), dict(engine.state_stream())
    assert sent.keys() == held.keys()
    largest = max(float((sent[name] - held[name]).abs().max()) for name in held)
    size = sum(4 * tensor.numel() for tensor in held.values())
    return largest, received, size, rollout.version
