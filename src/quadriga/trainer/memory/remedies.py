"""What to change if the memory plan of a run does not fit."""

from __future__ import annotations

import dataclasses
from typing import Literal

from quadriga.config.schema import (
    ActorConfig,
    Checkpointing,
    CriticConfig,
    EngineConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from quadriga.engines.base import HeadKind
from quadriga.engines.loading.model_setup import fits_8bit
from quadriga.engines.memory.states import TrainingMemory
from quadriga.errors import ModelError
from quadriga.trainer.memory.machine import gib
from quadriga.trainer.memory.phases import ACTOR, CRITIC, engine_settings
from quadriga.trainer.memory.plan import MemoryPlan, memory_plan
from quadriga.trainer.run.role_workers import critic_model

Part = Literal["processes", "states", "all"]
"""What of a plan is counted: processes; with parameters, gradients and moments; everything."""


def smaller_runs(plan: MemoryPlan) -> str:
    """Return what helps on a CPU whatever does not fit, in words."""
    fewer = "use fewer ranks of a node, or " if plan.ranks_per_node > 1 else "use "
    return f"{fewer}a smaller model"


def remedies(config: TrainConfig, plan: MemoryPlan, part: Part = "all") -> list[str]:
    """Return what to change, most effective first, for the pool that needs most. `part`: that does
    not fit."""
    pool = max(plan.pools, key=lambda pool: pool.largest[1])
    phase, _ = pool.largest
    found = []
    rollout = config.actor_rollout_ref.rollout
    generation = pool.generation
    if part == "states":
        pass  # what a batch needs is not in it
    elif generation is not None and generation.setting:
        if generation.reserved and (phase == "generation" or not rollout.take_turns):
            found.append(f"lower actor_rollout_ref.rollout.{generation.setting}")
    elif phase == "generation":
        found.append(f"lower actor_rollout_ref.rollout.micro_batch_size={rollout.micro_batch_size}")
    trained = {role: e.update_peak for role, e in pool.engines.items() if e.update is not None}
    if trained:
        role = max(trained, key=lambda role: trained[role])
        if part == "all":
            found += _batch_remedies(config, plan, role, pool.engines[role])
        found += _states_remedies(config, plan, role, pool.engines[role])
    if plan.device_type != "cpu":
        together = pool.generation is not None and ACTOR in pool.engines
        if together and not rollout.take_turns:
            found.append("set actor_rollout_ref.rollout.take_turns=true")
        found.append("shard over more ranks (trainer.n_gpus_per_node, trainer.nnodes)")
    else:
        found.append(smaller_runs(plan))
    return found


def _batch_remedies(
    config: TrainConfig, plan: MemoryPlan, role: str, engine: TrainingMemory
) -> list[str]:
    policy = config.actor_rollout_ref
    own = role == CRITIC and bool(config.critic.model.path)
    model, key = (config.critic.model, "critic") if own else (policy.model, "actor_rollout_ref")
    section, prefix = _section(config, role)
    found = []
    assert engine.update is not None
    for form, other in other_forms(config, plan.device_type, model.gradient_checkpointing).items():
        changed = engine_of(other, role)
        update = None if changed is None else changed.update
        if update is not None and update.activations < engine.update.activations:
            found.append(
                f"set {key}.model.gradient_checkpointing={form} (activations of the {role}: "
                f"{gib(engine.update.activations)} → {gib(update.activations)} GiB)"
            )
    if section.ppo_micro_batch_size_per_gpu is None and section.engine.use_dynamic_bsz:
        found.append(
            f"lower {prefix}.engine.max_tokens_per_micro_batch="
            f"{section.engine.max_tokens_per_micro_batch}"
        )
    else:
        found.append(f"lower {prefix}.ppo_micro_batch_size_per_gpu")
    return found


def _states_remedies(
    config: TrainConfig, plan: MemoryPlan, role: str, engine: TrainingMemory
) -> list[str]:
    """Return what makes parameters, gradients and optimizer states of a role smaller."""
    section, prefix = _section(config, role)
    model = critic_model(config) if role == CRITIC else config.actor_rollout_ref.model
    found = []
    fsdp = section.engine.name == "fsdp"
    if fsdp and plan.device_type != "cpu" and not section.engine.offload_policy:
        found.append(
            f"set {prefix}.engine.offload_policy=true (parameters, gradients and optimizer states "
            f"of the {role} in host memory: {gib(engine.states)} GiB at most)"
        )
    if not fsdp:
        found.append(
            f"divide the model of the {role} ({prefix}.engine.tensor_parallel_size, "
            f"{prefix}.engine.pipeline_parallel_size)"
        )
    elif offers_8bit(section.optim, section.engine, model, "value" if role == CRITIC else "lm"):
        found.append(f"set {prefix}.optim.name=adamw_8bit (a quarter of the optimizer states)")
    return found


def _section(config: TrainConfig, role: str) -> tuple[ActorConfig | CriticConfig, str]:
    """Return the settings of the training of a role, and their name."""
    if role == CRITIC:
        return config.critic, "critic"
    return config.actor_rollout_ref.actor, "actor_rollout_ref.actor"


def offers_8bit(
    optim: OptimConfig, engine: EngineConfig, model: ModelConfig, head: HeadKind
) -> bool:
    """Return whether moments in 8 bits can take the place of those that the settings ask for."""
    replaceable = optim.name == "adamw" and engine.tensor_parallel_size == 1
    return replaceable and fits_8bit(model, head)


FORMS: dict[str, Checkpointing] = {"true": True, "selective": "selective", "false": False}
"""Forms of activation checkpointing, as they are written, those with fewest bytes first."""


def other_forms(
    config: TrainConfig, device_type: str, current: Checkpointing
) -> dict[str, MemoryPlan]:
    """Return form → the plan with it, for each form that the models have, but for `current`."""
    plans = {}
    megatron = "megatron" in {engine_settings(config, role).name for role in (ACTOR, CRITIC)}
    for word, form in FORMS.items():
        if form != current and not (form == "selective" and megatron):
            try:
                plans[word] = memory_plan(_with_checkpointing(config, form), device_type)
            except ModelError:  # no layers to checkpoint; the plan with the current form was made
                continue
    return plans


def engine_of(plan: MemoryPlan, role: str) -> TrainingMemory | None:
    return next((p.engines[role] for p in plan.pools if role in p.engines), None)


def _with_checkpointing(config: TrainConfig, value: Checkpointing) -> TrainConfig:
    """Return the same settings with another form of activation checkpointing."""

    def changed(model: ModelConfig) -> ModelConfig:
        return dataclasses.replace(model, gradient_checkpointing=value)

    policy, critic = config.actor_rollout_ref, config.critic
    return dataclasses.replace(
        config,
        actor_rollout_ref=dataclasses.replace(policy, model=changed(policy.model)),
        critic=dataclasses.replace(critic, model=changed(critic.model)),
    )
