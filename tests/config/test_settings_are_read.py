"""Each setting of the training engines has a place that reads it, which is listed here.

The memory plan, the checks and the command line read settings too, but they only describe a run.
"""

from __future__ import annotations

import ast
import dataclasses
from functools import cache
from pathlib import Path

import pytest

import quadriga
from quadriga.config.schema import (
    ActorConfig,
    CriticConfig,
    EngineConfig,
    OptimConfig,
    PolicyLossConfig,
    RefConfig,
    ReplicasConfig,
)

PACKAGE = Path(quadriga.__file__).parent
MEGATRON = "engines/megatron/settings.py"
FSDP, LOADING = "engines/fsdp.py", "engines/loading.py"
POLICY, CRITIC, UPDATES = (
    "workers/actor_rollout_ref.py", "workers/critic.py", "workers/updates.py",
)  # fmt: skip
MODEL_RANKS = "parallel/model_parallel/model_ranks.py"
OBJECTIVES, SCHEDULE = "workers/objectives.py", "engines/optimizers/sharded.py"
REPLICAS = "trainer/replicas/"
ADAMW, SHARDED = "engines/optimizers/rules.py", "engines/optimizers/sharded.py"
READERS = {
    EngineConfig: {
        "name": ("engines/__init__.py", "engine.name"),
        "dtype": (FSDP, "engine.dtype"),
        "reduce_dtype": (LOADING, "engine.reduce_dtype"),
        "reshard_after_forward": (LOADING, "engine.reshard_after_forward"),
        "reduce_each_micro_batch": (FSDP, "engine.reduce_each_micro_batch"),
        "param_offload": (FSDP, "engine.param_offload"),
        "optimizer_offload": (FSDP, "engine.optimizer_offload"),
        "offload_policy": (LOADING, "engine.offload_policy"),
        "fsdp_size": ("parallel/model_parallel/shard_meshes.py", "engine.fsdp_size"),
        "pipeline_parallel_size": (MEGATRON, "engine.pipeline_parallel_size"),
        "virtual_pipeline_parallel_size": (MEGATRON, "engine.virtual_pipeline_parallel_size"),
        "expert_parallel_size": (MEGATRON, "engine.expert_parallel_size"),
        "expert_tensor_parallel_size": (MEGATRON, "engine.expert_tensor_parallel_size"),
        "sequence_parallel": (MEGATRON, "engine.sequence_parallel"),
        "distributed_optimizer": ("engines/megatron/engine.py", "engine.distributed_optimizer"),
        "use_dynamic_bsz": ("config/schema.py", "self.use_dynamic_bsz"),
        "max_tokens_per_micro_batch": (
            "config/schema.py",
            "self.max_tokens_per_micro_batch",
        ),
        "tensor_parallel_size": (
            "parallel/model_parallel/model_ranks.py",
            "engine.tensor_parallel_size",
        ),
        "sequence_parallel_size": (
            "parallel/model_parallel/model_ranks.py",
            "engine.sequence_parallel_size",
        ),
        "context_parallel_size": (
            "parallel/model_parallel/model_ranks.py",
            "engine.context_parallel_size",
        ),
        "fused_head": (LOADING, "engine.fused_head"),
        "attention": (LOADING, "engine.attention"),
    },
    ActorConfig: {
        "optim": (POLICY, "actor.optim"),
        "engine": (POLICY, "actor.engine"),
        "policy_loss": (OBJECTIVES, "config.policy_loss"),
        "ppo_mini_batch_size": (UPDATES, "config.ppo_mini_batch_size"),
        "ppo_micro_batch_size_per_gpu": (UPDATES, "config.ppo_micro_batch_size_per_gpu"),
        "ppo_epochs": (UPDATES, "config.ppo_epochs"),
        "old_log_probs_from_update": (
            "trainer/dataflow.py",
            "config.actor_rollout_ref.actor.old_log_probs_from_update",
        ),
        "shuffle": (UPDATES, "config.shuffle"),
        "skip_zero_advantages": (OBJECTIVES, "config.skip_zero_advantages"),
        "loss_agg_mode": (OBJECTIVES, "self.config.loss_agg_mode"),
        "loss_scale_length": (UPDATES, "config.loss_scale_length"),
        "entropy_coeff": (OBJECTIVES, "self.config.entropy_coeff"),
        "use_kl_loss": (OBJECTIVES, "self.config.use_kl_loss"),
        "kl_loss_coef": (OBJECTIVES, "self.config.kl_loss_coef"),
        "kl_loss_type": (OBJECTIVES, "self.config.kl_loss_type"),
    },
    PolicyLossConfig: {
        "name": (OBJECTIVES, "self.config.policy_loss.name"),
        "clip_ratio_low": (OBJECTIVES, "policy_loss.clip_ratio_low"),
        "clip_ratio_high": (OBJECTIVES, "policy_loss.clip_ratio_high"),
        "clip_ratio_c": (OBJECTIVES, "policy_loss.clip_ratio_c"),
        "options": (OBJECTIVES, "policy_loss.options"),
    },
    RefConfig: {"engine": (POLICY, "self.config.ref.engine")},
    ReplicasConfig: {
        "enable": (REPLICAS + "start.py", "config.actor_rollout_ref.rollout.replicas.enable"),
        "request_rows": (REPLICAS + "rollout.py", "self._settings.request_rows"),
        "requests_in_flight": (REPLICAS + "rollout.py", "self._settings.requests_in_flight"),
        "prefix_share": (REPLICAS + "rollout.py", "settings.prefix_share"),
        "restarts": (REPLICAS + "start.py", "settings.replicas.restarts"),
    },
    CriticConfig: {
        "model": (CRITIC, "self.config.model"),
        "optim": (CRITIC, "self.config.optim"),
        "engine": (CRITIC, "self.config.engine"),
        "ppo_mini_batch_size": (CRITIC, "self.config.ppo_mini_batch_size"),
        "ppo_micro_batch_size_per_gpu": (UPDATES, "config.ppo_micro_batch_size_per_gpu"),
        "ppo_epochs": (CRITIC, "self.config.ppo_epochs"),
        "cliprange_value": (OBJECTIVES, "self.config.cliprange_value"),
        "loss_agg_mode": (OBJECTIVES, "self.config.loss_agg_mode"),
        "warmup_steps": ("trainer/ppo.py", "self.config.critic.warmup_steps"),
    },
    OptimConfig: {
        "name": ("engines/optimizers/choice.py", "config.name"),
        "lr": (SCHEDULE, "optim.lr"),
        "betas": (ADAMW, "config.betas"),
        "momentum": ("engines/optimizers/muon.py", "config.momentum"),
        "eps": (ADAMW, "config.eps"),
        "weight_decay": (ADAMW, "config.weight_decay"),
        "lr_scheduler": (SCHEDULE, "optim.lr_scheduler"),
        "lr_warmup_steps": (SCHEDULE, "optim.lr_warmup_steps"),
        "min_lr_ratio": (SCHEDULE, "optim.min_lr_ratio"),
        "total_steps": (FSDP, "optim.total_steps"),
        "grad_clip": (SHARDED, "self.config.grad_clip"),
        "max_skipped_steps": (SHARDED, "self.config.max_skipped_steps"),
    },
}
"""Section -> setting -> (file, the expression in it that reads the setting)."""


@cache
def expressions_read(file):
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    read = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute))
    return {ast.unparse(n) for n in read if isinstance(n.ctx, ast.Load)}


@pytest.mark.parametrize("section", READERS, ids=lambda section: section.__name__)
def test_every_setting_of_a_section_has_a_place_that_reads_it(section):
    settings = {field.name for field in dataclasses.fields(section)}
    assert settings == set(READERS[section]), "list the place that reads a new setting"
    unread = {
        name: place
        for name, place in READERS[section].items()
        if place[1] not in expressions_read(place[0])
    }
    assert not unread
