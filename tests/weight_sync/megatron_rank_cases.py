"""HybridFlow's groups on real ranks of the Megatron engine, for `test_megatron_groups.py`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from rank_cases import end, start

from quadriga.config.schema import EngineConfig, ModelConfig
from quadriga.engines import build_engine
from quadriga.parallel.layouts import Model, slices
from quadriga.weight_sync.channels import CollectiveChannel
from quadriga.weight_sync.planning.grouping import HybridDegrees, generation_layout
from quadriga.weight_sync.planning.plan import plan
from quadriga.weight_sync.sources import SourceReader, describe, own_weights
from quadriga.weight_sync.transport import Transport

BUCKET = 1 << 12


def trainings(ranks: int) -> list[tuple[int, int, int]]:
    """Return all (tensor, stages, replicas) of `ranks` ranks."""
    powers = [2**i for i in range(ranks.bit_length()) if ranks % 2**i == 0]
    return [(t, p, ranks // t // p) for t in powers for p in powers if ranks % (t * p) == 0]


def generations(training: tuple[int, int, int]) -> list[HybridDegrees]:
    """Return all generation degrees that divide those of training."""
    tensor, stages, replicas = training
    return [
        HybridDegrees(tensor, stages, replicas, t, p)
        for t in range(1, tensor + 1)
        for p in range(1, stages + 1)
        if tensor % t == 0 and stages % p == 0
    ]


def rank_main(rank: int, ranks: int, folder: str, work: str, port: int) -> None:
    from quadriga.engines.megatron.ranks import leave_ranks
    from quadriga.testing import megatron_on_cpu

    megatron_on_cpu.install()
    start(rank, ranks, port)
    found = {}
    for tensor, stages, replicas in trainings(ranks):
        engine = build_engine(
            ModelConfig(path=folder),
            EngineConfig(
                name="megatron", tensor_parallel_size=tensor, pipeline_parallel_size=stages
            ),
        )
        full = {name: weight.clone() for name, weight in engine.state_stream()}
        for degrees in generations((tensor, stages, replicas)):
            found[degrees] = reshard(rank, engine, degrees, full)
        leave_ranks()
    end(rank, work, found)


def reshard(rank: int, engine, degrees: HybridDegrees, full):
    """Return (bytes received, of the plan, not generated with; whether all tensors are right)."""
    from quadriga.engines.megatron.families import megatron_model

    weights = describe(engine)
    config, known = engine.folder.config, weights.layout.weights
    stored = megatron_model(
        config, known, tensor_ranks=degrees.gen_tensor, stages=degrees.gen_pipeline
    ).stored
    target = generation_layout(stored, Model(known, stored), degrees)
    current = plan(weights.layout, target)
    channel = CollectiveChannel(
        dist.group.WORLD, torch.device("cpu"), current.rounds(BUCKET), weights.dtypes
    )
    reader = SourceReader(own_weights(engine), weights, rank)
    transport = Transport(current, rank, reader, channel, weights.dtypes, torch.device("cpu"))
    made = dict(transport.run(BUCKET))
    right = made.keys() == {tensor.name for tensor in target.ranks[rank]}
    for tensor in target.ranks[rank]:
        expected = torch.zeros(tensor.shape)
        for piece in tensor.pieces:
            expected[slices(piece.at)] = full[piece.weight][slices(piece.box)]
        right = right and torch.equal(made[tensor.name], expected)
    received = transport.traffic.received
    return received, current.received_bytes(rank), current.redundant_bytes(rank), right
