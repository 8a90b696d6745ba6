"""Loading by shards against loading the whole model, for every architecture, bit for bit.

Nightly. The ranks are simulated in this process: a group of torch's backend "fake" has no other
processes, and loading communicates only to agree on errors.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from small_models import VARIANTS, small_model
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from quadriga.config.schema import ModelConfig
from quadriga.engines import loading
from quadriga.engines.loading import load_model
from quadriga.engines.sharding import shard_model
from quadriga.models.architectures import ARCHITECTURES
from quadriga.parallel.distributed import data_parallel_mesh
from quadriga.parallel.model_ranks import ShardMeshes

torch.set_num_threads(1)
CPU = torch.device("cpu")
CASES = [(name, {}) for name in ARCHITECTURES] + VARIANTS
# (ranks, fsdp_size, rank). Sizes of 1, 4 and 32 rows leave uneven and empty shards on 3 ranks. A
# process can stand for one rank of each mesh only, because torch caches the rows by the mesh.
RANKS = [(1, -1, 0), (2, -1, 1), (3, -1, 2), (4, 2, 3), (5, -1, 1)]
CONVERTED = {"bailing_hybrid", "hrm_text", "inkling2_text", "kimi_linear", "olmo_hybrid"}
"""Architectures with parameters that transformers computes, other than those of experts."""


def case_name(value):
    return ",".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value


def load_as(ranks, fsdp_size, rank, config, dtype, *, trained):
    """The model and the weights of one rank of a group, sharded and read."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        module, weights, _ = loading.prepared_model(config, "lm", dtype, trained=trained)
        mesh = data_parallel_mesh(CPU, fsdp_size)
        module = shard_model(
            module,
            ShardMeshes(mesh, mesh),
            compute_dtype=dtype,
            reduce_dtype=torch.float32,
            reshard_after_forward=True,
            min_unit_parameters=1,
        )
        if weights is not None:
            weights.read_into(module, CPU)
        return module, weights
    finally:
        dist.destroy_process_group()


def rows_of_rank(full, ranks, fsdp_size, rank):
    """The rows of a shard: all ranks but the last ones have the same number."""
    shards = ranks if fsdp_size == -1 else fsdp_size
    size = -(-len(full) // shards)
    return full[rank % shards * size :][:size]


def check_shards(module, whole, ranks):
    """Compare what this rank holds with its rows of the whole model."""
    tensors = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert list(held) == list(tensors)
    assert module.state_dict().keys() == whole.state_dict().keys()
    for name, tensor in held.items():
        expected = tensors[name].detach()
        assert tensor.requires_grad == tensors[name].requires_grad, name
        if isinstance(tensor, DTensor):
            tensor, expected = tensor.to_local(), rows_of_rank(expected, *ranks)
        assert tensor.dtype == expected.dtype, name
        assert torch.equal(tensor, expected), name


@pytest.mark.nightly
@pytest.mark.parametrize(("model_type", "changes"), CASES, ids=case_name)
def test_shards_are_the_rows_of_the_whole_model(model_type, changes, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "gather_over_ranks", lambda value: [value])
    small_model(model_type, changes).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    whole = load_model(config, "lm", torch.float32, trained=True)
    for ranks in RANKS:
        module, weights = load_as(*ranks, config, torch.float32, trained=True)
        assert (weights is None) is (model_type in CONVERTED)
        if weights is None:
            return
        check_shards(module, whole, ranks)
        assert (module.training, whole.training) == (False, False)
        assert module.config.to_dict() == whole.config.to_dict()
        assert module.generation_config.to_dict() == whole.generation_config.to_dict()
    ranks = (3, -1, 2)
    frozen, _ = load_as(*ranks, config, torch.bfloat16, trained=False)
    check_shards(frozen, load_model(config, "lm", torch.bfloat16, trained=False), ranks)
