"""What to change if the memory plan of a run does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

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
from quadriga.engines.loading import fits_8bit
from quadriga.engines.memory.states import TrainingMemory
from quadriga.errors import ModelError
from quadriga.trainer.memory.machine import gib
from quadriga.trainer.memory.phases import (
    ACTOR,
    CRITIC,
    PASSES,
    REWARD_MODEL,
    Part,
    PoolMemory,
    engine_settings,
)
from quadriga.trainer.memory.plan import MemoryPlan, memory_plan
from quadriga.trainer.roles.needed import critic_model


def smaller_runs(plan: MemoryPlan) -> str:
    """Return what helps on a CPU whatever does not fit, in words."""
    fewer = "use fewer ranks of a node, or " if plan.ranks_per_node > 1 else "use "
    return f"{fewer}a smaller model"


def remedies(config: TrainConfig, plan: MemoryPlan, part: Part = "all") -> list[str]:
    """Return what to change, most effective first, for the pool that needs most of `part`.

    A setting with a value is only named if the bytes of that pool fall with it.
    """
    return list(_Remedies(config, plan, part, plan.largest_pool(part)).found())


@dataclass(frozen=True)
class _Remedies:
    """What makes a part of the pool `number` of a plan smaller."""

    config: TrainConfig
    plan: MemoryPlan
    part: Part
    number: int

    @property
    def _pool(self) -> PoolMemory:
        return self.plan.pools[self.number]

    def found(self) -> Iterator[str]:
        """Yield what to change, most effective first."""
        rollout, pool = self.config.actor_rollout_ref.rollout, self._pool
        if self.part == "all":  # what a batch needs is in no other part
            yield from self._of_generation()
            yield from self._of_pass()
        trained = {r: e.update_peak for r, e in pool.engines.items() if e.update is not None}
        for role in sorted(trained, key=lambda role: -trained[role]):
            yield from self._of_states(role)
        if self.plan.device_type == "cpu":
            yield smaller_runs(self.plan)
            return
        together = pool.generation is not None and ACTOR in pool.engines
        if together and not rollout.take_turns and self._less(self._rollout(take_turns=True)):
            yield "set actor_rollout_ref.rollout.take_turns=true"
        yield "shard over more ranks (trainer.n_gpus_per_node, trainer.nnodes)"

    def _less(self, changed: TrainConfig) -> MemoryPlan | None:
        """Return the plan with other settings, if the number that does not fit is smaller in it."""
        try:
            other = memory_plan(changed, self.plan.device_type)
        except ModelError:  # no layers to checkpoint; the plan with the current form was made
            return None
        own = self._pool.bytes_of(self.part)
        return other if other.pools[self.number].bytes_of(self.part) < own else None

    def _rollout(self, **values: Any) -> TrainConfig:
        policy = self.config.actor_rollout_ref
        rollout = replace(policy.rollout, **values)
        return replace(self.config, actor_rollout_ref=replace(policy, rollout=rollout))

    def _trained(self, role: str, **values: Any) -> TrainConfig:
        """Return the settings with other values in the section of the training of a role."""
        config, policy = self.config, self.config.actor_rollout_ref
        if role == CRITIC:
            return replace(config, critic=replace(config.critic, **values))
        actor = replace(policy.actor, **values)
        return replace(config, actor_rollout_ref=replace(policy, actor=actor))

    def _of_generation(self) -> Iterator[str]:
        rollout, generation = self.config.actor_rollout_ref.rollout, self._pool.generation
        phase, _ = self._pool.largest
        if generation is not None and generation.setting:
            if generation.reserved and (phase == "generation" or not rollout.take_turns):
                yield f"lower actor_rollout_ref.rollout.{generation.setting}"
        elif phase == "generation" and self._less(self._rollout(micro_batch_size=1)):
            yield f"lower actor_rollout_ref.rollout.micro_batch_size={rollout.micro_batch_size}"

    def _of_pass(self) -> Iterator[str]:
        """Yield what makes the largest phase smaller, if it is a pass of a role."""
        phase, _ = self._pool.largest
        engines = self._pool.engines
        role = next((r for r in engines if phase in (PASSES[r], f"update of the {r}")), None)
        if role is None:
            return
        updates = phase != PASSES[role]
        if updates:
            yield from self._of_checkpointing(role, engines[role])
        yield from self._of_micro_batch(role, updates=updates)

    def _of_checkpointing(self, role: str, engine: TrainingMemory) -> Iterator[str]:
        own = role == CRITIC and bool(self.config.critic.model.path)
        policy = self.config.actor_rollout_ref.model
        model, key = (self.config.critic.model, "critic") if own else (policy, "actor_rollout_ref")
        forms = forms_beside(model.gradient_checkpointing, _engine_names(self.config))
        for word, form in forms.items():
            changed = _with_checkpointing(self.config, form)
            if (other := self._less(changed)) is not None:
                saved = saved_activations(role, engine, other)
                yield f"set {key}.model.gradient_checkpointing={word} ({saved})"

    def _of_micro_batch(self, role: str, *, updates: bool) -> Iterator[str]:
        """Yield the setting that limits the micro-batches of a role, if it can be lowered."""
        config, engine = self.config, engine_settings(self.config, role)
        own = self._pool.engines[role]
        counted = own.update if updates else own.evaluate
        if counted is None or counted.rows <= 1:
            return
        if updates and not self._less(self._trained(role, ppo_micro_batch_size_per_gpu=1)):
            return  # the update of the parameters needs most, whatever the micro-batch
        prefix = role if role in (CRITIC, REWARD_MODEL) else f"actor_rollout_ref.{role}"
        if role == REWARD_MODEL:
            name = "reward_model.micro_batch_size_per_gpu"
            rows: int | None = config.reward_model.micro_batch_size_per_gpu
        else:  # the reference has the micro-batches of the actor
            section, where = _section(config, role)
            name, rows = (
                f"{where}.ppo_micro_batch_size_per_gpu",
                section.ppo_micro_batch_size_per_gpu,
            )
            if not updates:  # with a limit of tokens it does not limit passes without gradients
                rows = engine.forward_rows(rows)
        if engine.use_dynamic_bsz and rows is None:
            budget = engine.max_tokens_per_micro_batch
            yield f"lower {prefix}.engine.max_tokens_per_micro_batch={budget}"
        elif rows != 1:
            yield f"lower {name}" + ("" if rows is None else f"={rows}")

    def _of_states(self, role: str) -> Iterator[str]:
        """Yield what makes parameters, gradients and optimizer states of a role smaller."""
        section, prefix = _section(self.config, role)
        engine, on_cpu = section.engine, self.plan.device_type == "cpu"
        hosted = self._trained(role, engine=replace(engine, offload_policy=True))
        if engine.name != "fsdp":
            if len(self._pool.pool.ranks) > engine.model_parallel_size:
                yield (
                    f"divide the model of the {role} ({prefix}.engine.tensor_parallel_size, "
                    f"{prefix}.engine.pipeline_parallel_size)"
                )
            return
        if not on_cpu and not engine.offloads and self._less(hosted):
            yield (
                f"set {prefix}.engine.offload_policy=true (parameters, gradients and optimizer "
                f"states of the {role} in host memory: {gib(self._pool.engines[role].states)} GiB "
                "at most)"
            )
        model = critic_model(self.config) if role == CRITIC else self.config.actor_rollout_ref.model
        if offers_8bit(section.optim, engine, model, "value" if role == CRITIC else "lm"):
            changed = self._trained(role, optim=replace(section.optim, name="adamw_8bit"))
            if self._less(changed):
                yield f"set {prefix}.optim.name=adamw_8bit (a quarter of the optimizer states)"


def saved_activations(role: str, engine: TrainingMemory, other: MemoryPlan) -> str:
    """Return the activations of an engine, and those in another plan, in words."""
    before, after = (
        gib(0 if e is None or e.update is None else e.update.activations)
        for e in (engine, engine_of(other, role))
    )
    return f"activations of the {role}: {before} → {after} GiB"


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


def forms_beside(current: Checkpointing, engines: Iterable[str]) -> dict[str, Checkpointing]:
    """Return word → form, for each form beside `current` that engines of these names have."""
    megatron = "megatron" in engines
    return {
        word: form
        for word, form in FORMS.items()
        if form != current and not (form == "selective" and megatron)
    }


def other_forms(
    config: TrainConfig, device_type: str, current: Checkpointing
) -> dict[str, MemoryPlan]:
    """Return form → the plan with it, for each form that the models have, but for `current`."""
    plans = {}
    for word, form in forms_beside(current, _engine_names(config)).items():
        try:
            plans[word] = memory_plan(_with_checkpointing(config, form), device_type)
        except ModelError:  # no layers to checkpoint; the plan with the current form was made
            continue
    return plans


def _engine_names(config: TrainConfig) -> list[str]:
    return [engine_settings(config, role).name for role in (ACTOR, CRITIC)]


def engine_of(plan: MemoryPlan, role: str) -> TrainingMemory | None:
    return next((p.engines[role] for p in plan.pools if role in p.engines), None)


def _with_checkpointing(config: TrainConfig, value: Checkpointing) -> TrainConfig:
    """Return the same settings with another form of activation checkpointing."""

    def changed(model: ModelConfig) -> ModelConfig:
        return replace(model, gradient_checkpointing=value)

    policy, critic = config.actor_rollout_ref, config.critic
    return replace(
        config,
        actor_rollout_ref=replace(policy, model=changed(policy.model)),
        critic=replace(critic, model=changed(critic.model)),
    )
