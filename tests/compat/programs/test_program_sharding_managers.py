"""Programs with sharding managers of verl: the trained weights reach the rollout."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen2Config

import quadriga.compat.verl  # noqa: F401 - provides the modules of verl
from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines import build_engine
from quadriga.errors import ConfigError, LengthError, RolloutError, WorkerError
from quadriga.protocol import DataProto
from quadriga.rollout import build_rollout
from rank_groups import run_ranks

IDS = torch.arange(5, 45).view(4, 10)


def step(engine):
    batch = {
        "input_ids": IDS,
        "attention_mask": torch.ones_like(IDS),
        "response_mask": torch.ones(4, 6, dtype=torch.int64),
    }
    engine.train_step(batch, lambda out, rows: (-out["log_probs"].sum(), {}))


def test_a_block_generates_with_the_weights_that_are_trained(folder):
    from verl.workers.sharding_manager.fsdp_vllm import FSDPVLLMShardingManager

    model = ModelConfig(path=folder)
    engine = build_engine(model, EngineConfig(), OptimConfig(lr=0.01), total_steps=4)
    rollout = build_rollout("hf", model)
    manager = FSDPVLLMShardingManager(
        module=engine, inference_engine=rollout, model_config=engine.module.config,
        full_params=True, device_mesh=None, offload_param=True, load_format="dummy_dtensor",
        layered_summon=False,
    )  # fmt: skip
    data = DataProto.from_dict({"input_ids": IDS})
    for version in (1, 2):
        step(engine)
        with manager:
            assert rollout.version == version and manager.timing["reshard"] > 0
            assert manager.preprocess_data(data) is manager.postprocess_data(data) is data
            held = rollout.module.state_dict()
            assert all(torch.equal(held[name], full) for name, full in engine.state_stream())
            rollout.score(IDS, torch.ones_like(IDS))
        with pytest.raises(RolloutError):
            rollout.score(IDS, torch.ones_like(IDS))


def test_a_weight_that_does_not_arrive_ends_the_entry(folder, monkeypatch):
    from verl.workers.sharding_manager.fsdp_vllm import FSDPVLLMShardingManager

    model = ModelConfig(path=folder)
    engine, rollout = build_engine(model, EngineConfig(), None), build_rollout("hf", model)
    update = rollout.update_weights

    def lose_one(stream, version):
        update([(name, full) for name, full in stream if name != "model.norm.weight"], version)

    monkeypatch.setattr(rollout, "update_weights", lose_one)
    with torch.no_grad():
        rollout.module.state_dict()["model.norm.weight"].zero_()
    with (
        pytest.raises(WorkerError, match=r"model\.norm\.weight"),
        FSDPVLLMShardingManager(engine, rollout),
    ):
        pass


def test_what_has_no_meaning_is_refused(folder):
    from verl.workers.sharding_manager.base import BaseShardingManager
    from verl.workers.sharding_manager.fsdp_vllm import FSDPVLLMShardingManager

    rollout = build_rollout("hf", ModelConfig(path=folder))
    with pytest.raises(ConfigError, match=r"no arguments \['use_param_offload'\]"):
        FSDPVLLMShardingManager(rollout, rollout, use_param_offload=True)
    engine = build_engine(ModelConfig(path=folder), EngineConfig(), None)
    with pytest.raises(ConfigError, match=r"model_type 'qwen2', but .* of type 'llama'"):
        FSDPVLLMShardingManager(engine, rollout, Qwen2Config())
    with pytest.raises(ConfigError, match="got HFRollout and HFRollout"):
        FSDPVLLMShardingManager(rollout, rollout)
    with BaseShardingManager() as nothing:
        assert nothing is None


def test_the_managers_of_other_engines_have_their_names(folder):
    from verl.workers.sharding_manager.fsdp_ulysses import FSDPUlyssesShardingManager
    from verl.workers.sharding_manager.megatron_vllm import MegatronVLLMShardingManager

    model = ModelConfig(path=folder)
    engine, rollout = build_engine(model, EngineConfig(), None), build_rollout("hf", model)
    rows = DataProto.from_dict({"x": torch.tensor([1, 2])})
    with FSDPUlyssesShardingManager(None) as nothing, MegatronVLLMShardingManager(engine, rollout):
        assert nothing is None and rollout.version == 1
        assert FSDPUlyssesShardingManager().preprocess_data(rows) is rows
    with pytest.raises(ConfigError, match=r"MegatronVLLMShardingManager has no arguments"):
        MegatronVLLMShardingManager(engine, rollout, weight_converter=None)


def rows_of_two_ranks(rank: int, folder: str, port: int) -> None:
    from quadriga.compat.verl.training.sharding_managers import (
        FSDPUlyssesShardingManager,
        FSDPVLLMShardingManager,
    )

    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    torch.set_num_threads(1)
    model = ModelConfig(path=folder)
    engine, rollout = build_engine(model, EngineConfig(), None), build_rollout("hf", model)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "infer_tp"))
    manager = FSDPVLLMShardingManager(engine, rollout, device_mesh=mesh)
    own = DataProto.from_dict({"x": torch.tensor([10 * rank, 10 * rank + 1])})
    with manager:
        together = manager.preprocess_data(own)
        assert together.batch["x"].tolist() == [0, 1, 10, 11]
        assert manager.postprocess_data(together).batch["x"].tolist() == own.batch["x"].tolist()
    # The rows that dispatch has given to each rank, as `DP_COMPUTE_PROTO` does.
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp"))
    ulysses = FSDPUlyssesShardingManager(mesh)
    shared = build_engine(model, EngineConfig(sequence_parallel_size=2), None)
    mask = torch.ones_like(IDS)
    batch = {"input_ids": IDS, "attention_mask": mask, "response_mask": mask[:, 4:]}
    data = DataProto.from_dict(batch)[2 * rank : 2 * rank + 2]
    with ulysses:
        whole = ulysses.preprocess_data(data)
        out = shared.forward(dict(whole.batch.items()))
        part = ulysses.postprocess_data(DataProto.from_dict(dict(out)))
    alone = engine.forward(batch)["log_probs"]
    torch.testing.assert_close(out["log_probs"], alone)
    torch.testing.assert_close(part.batch["log_probs"], alone[2 * rank : 2 * rank + 2])
    with pytest.raises(LengthError, match=r"have \[2, 1\] rows, which must be equal"):
        ulysses.preprocess_data(data[rank:])
    dist.destroy_process_group()


@pytest.mark.nightly
def test_ranks_that_generate_together_share_their_rows(folder):
    run_ranks(2, rows_of_two_ranks, folder)
