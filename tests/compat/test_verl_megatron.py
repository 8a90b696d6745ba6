"""Settings of verl's Megatron engine become settings of ours."""

from __future__ import annotations

from quadriga.compat.verl_settings import read_verl
from quadriga.compat.verl_table import TRAIN
from quadriga.config.schema import EngineConfig, TrainConfig

MEGATRON = """
actor_rollout_ref:
  actor:
    strategy: megatron
    megatron:
      tensor_model_parallel_size: 2
      pipeline_model_parallel_size: 4
      virtual_pipeline_model_parallel_size: 2
      expert_model_parallel_size: 1
      expert_tensor_parallel_size: null
      context_parallel_size: 1
      sequence_parallel: true
      use_distributed_optimizer: false
      grad_offload: true
      optimizer_offload: true
      dtype: bfloat16
  ref:
    megatron: {pipeline_model_parallel_size: 2, sequence_parallel: true}
critic:
  strategy: fsdp2
  megatron: {tensor_model_parallel_size: 8}
"""


def test_megatron_is_translated(tmp_path):
    (tmp_path / "main.yaml").write_text(MEGATRON)
    told = read_verl(TrainConfig, TRAIN, tmp_path / "main.yaml")
    actor = told.config.actor_rollout_ref.actor.engine
    assert actor == EngineConfig(
        name="megatron",
        dtype="bfloat16",
        optimizer_offload=True,
        tensor_parallel_size=2,
        pipeline_parallel_size=4,
        virtual_pipeline_parallel_size=2,
        sequence_parallel=True,
        distributed_optimizer=False,
    )
    reference = told.config.actor_rollout_ref.ref.engine  # sequence_parallel needs tensor ranks
    assert reference == EngineConfig(name="megatron", pipeline_parallel_size=2)
    assert told.config.critic.engine == EngineConfig()
    assert "actor_rollout_ref.actor.megatron.grad_offload" in told.ignored
