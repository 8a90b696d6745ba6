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
from quadriga.trainer.memory.phases import (
    ACTOR,
    CRITIC,
    PASSES,
    REWARD_MODEL,
    engine_settings,
)
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
    number = plan.pools.index(
        max(plan.pools, key=lambda p: p.states if part == "states" else p.largest[1])
    )
    pool = plan.pools[number]
    phase, _ = pool.largest
    found = []
    rollout = config.actor_rollout_ref.rollout
    generation = pool.generation
    if part == "states":
        pass  # what a batch needs is not in it
    elif generation is not None and generation.setting:
        if generation.reserved and (phase == "generation" or not rollout.take_turns):
            found.append(f"lower actor_rollout_ref.rollout.{generation.setting}")
    elif phase == "generation" and rollout.micro_batch_size > 1:
        found.append(f"lower actor_rollout_ref.rollout.micro_batch_size={rollout.micro_batch_size}")
    if part == "all":
        found += _pass_remedies(config, plan, number)
    trained = {role: e.update_peak for role, e in pool.engines.items() if e.update is not None}
    if trained:
        role = max(trained, key=lambda role: trained[role])
        found += _states_remedies(config, plan, role, pool.engines[role])
    if plan.device_type != "cpu":
        together = pool.generation is not None and ACTOR in pool.engines
        if together and not rollout.take_turns:
            found.append("set actor_rollout_ref.rollout.take_turns=true")
        found.append("shard over more ranks (trainer.n_gpus_per_node, trainer.nnodes)")
    else:
        found.append(smaller_runs(plan))
    return found


def _pass_remedies(config: TrainConfig, plan: MemoryPlan, number: int) -> list[str]:
    """Return what makes the largest phase of the pool `number` smaller, if it is a pass.

    If it is none, an update can be too large beside it.
    """
    pool = plan.pools[number]
    phase, _ = pool.largest
    role = next((r for r in pool.engines if phase in (PASSES[r], f"update of the {r}")), None)
    if role is None:
        peaks = {r: e.update_peak for r, e in pool.engines.items() if e.update is not None}
        if not peaks:
            return []
        role = max(peaks, key=lambda role: peaks[role])
        phase = f"update of the {role}"
    updates = phase != PASSES[role]
    engine, size = pool.engines[role], pool.phases[phase]
    if updates and engine.step_peak >= engine.backward_peak:
        return []  # the update of the parameters needs most, whatever the micro-batch
    found = []
    if updates:
        own = role == CRITIC and bool(config.critic.model.path)
        policy = config.actor_rollout_ref.model
        model, key = (config.critic.model, "critic") if own else (policy, "actor_rollout_ref")
        forms = other_forms(config, plan.device_type, model.gradient_checkpointing)
        for form, other in forms.items():
            changed = engine_of(other, role)
            if changed is not None and other.pools[number].phases[phase] < size:
                found.append(
                    f"set {key}.model.gradient_checkpointing={form} (activations of the {role}: "
                    f"{_activations(engine)} → {_activations(changed)} GiB)"
                )
    return [*found, *_smaller_micro_batch(config, role, updates=updates)]


def _activations(engine: TrainingMemory) -> str:
    return gib(0 if engine.update is None else engine.update.activations)


def _smaller_micro_batch(config: TrainConfig, role: str, *, updates: bool) -> list[str]:
    """Return the setting that limits the micro-batches of a role, if it can be lowered."""
    engine = engine_settings(config, role)
    prefix = role if role in (CRITIC, REWARD_MODEL) else f"actor_rollout_ref.{role}"
    if role == REWARD_MODEL:
        name = "reward_model.micro_batch_size_per_gpu"
        rows: int | None = config.reward_model.micro_batch_size_per_gpu
    else:  # the reference has the micro-batches of the actor
        section, own = _section(config, role)
        name, rows = f"{own}.ppo_micro_batch_size_per_gpu", section.ppo_micro_batch_size_per_gpu
        if not updates:  # with a limit of tokens it does not limit passes without gradients
            rows = engine.forward_rows(rows)
    if engine.use_dynamic_bsz and rows is None:
        budget = engine.max_tokens_per_micro_batch
        return [f"lower {prefix}.engine.max_tokens_per_micro_batch={budget}"]
    return [] if rows == 1 else [f"lower {name}" + ("" if rows is None else f"={rows}")]


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
