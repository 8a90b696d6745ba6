"""What each role needs on a rank, and how much of it exists at once.

Roles of one pool share the processes and the device of each rank. While one of them computes, the
others hold their parameters and moments, unless the settings offload them:

    phase                  actor                      rollout         critic
    generation             parameters, moments        weights, peak   parameters, moments
    log-probabilities      … and peak of the pass     weights         parameters, moments
    update of the actor    … and peak of the update   weights         parameters, moments

A run fits if its largest phase fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from quadriga.config.plan import UpdatePlan, batch_plan
from quadriga.config.role_ranks import RolePool, added_keys, base_is_in_actor, role_pools
from quadriga.config.schema import DtypeName, EngineConfig, ModelConfig, OptimConfig, TrainConfig
from quadriga.engines import ENGINES
from quadriga.engines.base import HeadKind
from quadriga.engines.memory.engines import engine_memory
from quadriga.engines.memory.passes import Rows
from quadriga.engines.memory.states import TrainingMemory
from quadriga.models.folder import local_folder
from quadriga.rollout.base import SamplingParams
from quadriga.rollout.memory import (
    GeneratedRows,
    GenerationMemory,
    generation_memory,
    planned_sampling,
)
from quadriga.trainer.dataflow import (
    needs_reference,
    reads_ref_log_prob,
    takes_old_log_probs_from_update,
)
from quadriga.trainer.memory.machine import GIB
from quadriga.trainer.run.checks.images import uncounted_images
from quadriga.trainer.run.role_workers import critic_model, uses_of_run
from quadriga.workers.objectives import entropy_use

PROCESS_BYTES = {"cpu": GIB // 2, "accelerator": GIB}
"""What a rank needs beside tensors: Python and libraries; on an accelerator the context of the
device and the buffers of its collectives. Rounded figures, not measured for each machine."""

ACTOR, ROLLOUT, REF, CRITIC, REWARD_MODEL = "actor", "rollout", "ref", "critic", "reward_model"
TRAINING = (ACTOR, REF, CRITIC, REWARD_MODEL)
"""The roles with a training engine."""


@dataclass(frozen=True)
class PoolMemory:
    """Bytes of one rank of a pool.

    Attributes:
        engines: role → its training engine.
        generation: the rollout engine, if the pool has it.
        phases: phase → the bytes that exist at once, the process itself included.
        states: the same without activations and KV cache, in the largest phase.
    """

    pool: RolePool
    engines: Mapping[str, TrainingMemory]
    generation: GenerationMemory | None
    phases: Mapping[str, int]
    states: int

    @property
    def largest(self) -> tuple[str, int]:
        """The phase in which most bytes exist, and these bytes."""
        return max(self.phases.items(), key=lambda item: item[1])


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a run.

    Attributes:
        missing: what the plan does not count, in words.
    """

    device_type: str
    pools: tuple[PoolMemory, ...]
    ranks_per_node: int
    missing: tuple[str, ...] = field(default=())


def memory_plan(config: TrainConfig, device_type: str) -> MemoryPlan:
    """Return the memory of a run whose settings were checked.

    Raises:
        ModelError: a model folder has no config of a suitable model.
    """
    roles = _Roles(config, device_type)
    uses = uses_of_run(config)
    roles.missing += [f"the added role {use}" for use in uses if use in added_keys(config)]
    pools = tuple(
        _planned_pool(config, device_type, pool, roles) for pool in role_pools(config, uses)
    )
    return MemoryPlan(device_type, pools, config.trainer.n_gpus_per_node, tuple(roles.missing))


class _Roles:
    """The engines of a run, role by role."""

    def __init__(self, config: TrainConfig, device_type: str) -> None:
        self.config = config
        self.device_type = device_type
        self.batch = batch_plan(config)
        self.missing = uncounted_images(config.actor_rollout_ref.model)

    def engine(self, role: str, ranks: int) -> TrainingMemory | None:
        """Return the training engine of `role`; None if it is of a kind that is not known."""
        policy, critic = self.config.actor_rollout_ref, self.config.critic
        settings = engine_settings(self.config, role)
        if settings.name not in ENGINES:
            self.missing.append(f"{role} (engine {settings.name})")
            return None
        model = critic_model(self.config) if role == CRITIC else policy.model
        if role == REWARD_MODEL:
            model = self.config.reward_model.model
        memory = _training_memory(
            _config_text(model),
            model,
            settings,
            _HEADS.get(role, "lm"),
            ranks,
            self.device_type,
            self._update_rows(role),
            self._evaluated_rows(role, settings, ranks),
            critic.optim if role == CRITIC else policy.actor.optim,
        )
        if memory.uncounted:
            self.missing.append(f"activations of the {role} ({memory.uncounted})")
        return memory

    def _update_rows(self, role: str) -> Rows | None:
        if role in (REF, REWARD_MODEL):
            return None
        plan: UpdatePlan = self.batch.actor if role == ACTOR else self.batch.critic
        section = self.config.actor_rollout_ref.actor if role == ACTOR else self.config.critic
        rows = self._rows(plan.mini_batch_per_rank, section.ppo_micro_batch_size_per_gpu)
        if role != ACTOR:
            return rows
        in_update = takes_old_log_probs_from_update(self.config)
        policy = self.config.actor_rollout_ref.actor
        return replace(rows, entropy=entropy_use(policy, old_from_update=in_update))

    def _evaluated_rows(self, role: str, engine: EngineConfig, ranks: int) -> Rows | None:
        actor = self.config.actor_rollout_ref.actor
        base = base_is_in_actor(self.config) and needs_reference(self.config)
        if role == ACTOR and takes_old_log_probs_from_update(self.config) and not base:
            return None
        if role == REF and not reads_ref_log_prob(self.config):
            return self._update_rows(ACTOR)  # computed in the micro-batches of the update
        section = self.config.critic if role == CRITIC else actor
        size = engine.forward_rows(section.ppo_micro_batch_size_per_gpu)
        if role == REWARD_MODEL:
            size = self.config.reward_model.micro_batch_size_per_gpu
        rows = self.batch.sequences * engine.model_parallel_size
        return self._rows(math.ceil(rows / ranks), size)

    def _rows(self, count: int, micro_batch: int | None) -> Rows:
        data, samples = self.config.data, self.config.actor_rollout_ref.rollout.n
        # Rows of one prompt are neighbours only if their group is on one rank.
        shared = min(samples, count) if self.config.trainer.balance_groups else 1
        return Rows(
            max(count, 1), data.max_prompt_length, data.max_response_length,
            samples=max(shared, 1), micro_batch=micro_batch,
        )  # fmt: skip

    def generation(self, ranks: int) -> GenerationMemory | None:
        """Return the rollout engine; None if it is of a kind that is not known."""
        config, rollout = self.config, self.config.actor_rollout_ref.rollout
        if rollout.name != "hf":
            self.missing.append(f"rollout (engine {rollout.name})")
            return None
        data, limit = config.data, rollout.micro_batch_size
        count = min(limit, math.ceil(self.batch.sequences / ranks))
        prompts = math.ceil(count / rollout.n)
        if data.val_files:
            validated = min(limit, math.ceil(data.val_batch_size / ranks))
            count, prompts = max(count, validated), max(prompts, validated)
        memory = _generation_memory(
            _config_text(config.actor_rollout_ref.model),
            config.actor_rollout_ref.model,
            GeneratedRows(count, prompts, data.max_prompt_length, data.max_response_length),
            planned_sampling(rollout.sampling, data.max_response_length),
            rollout.dtype,
            self.device_type,
        )
        if memory.uncounted:
            self.missing.append(f"KV cache and buffers of the rollout ({memory.uncounted})")
        return memory


# A pass is counted once for each config.json and each set of arguments: the table and the refusal
# need some of them twice.


@lru_cache(maxsize=32)
def _training_memory(
    config_text: str,
    model: ModelConfig,
    engine: EngineConfig,
    head: HeadKind,
    ranks: int,
    device_type: str,
    update: Rows | None,
    evaluate: Rows | None,
    optim: OptimConfig,
) -> TrainingMemory:
    return engine_memory(
        model, engine, head=head, ranks=ranks, device_type=device_type, update=update,
        evaluate=evaluate, optim=optim,
    )  # fmt: skip


@lru_cache(maxsize=32)
def _generation_memory(
    config_text: str,
    model: ModelConfig,
    rows: GeneratedRows,
    sampling: SamplingParams,
    dtype: DtypeName,
    device_type: str,
) -> GenerationMemory:
    return generation_memory(model, rows, sampling, dtype=dtype, device_type=device_type)


def _config_text(model: ModelConfig) -> str:
    """Return the config.json of a model; "" if there is none, which the plan then reports."""
    file = local_folder(model.path, weights=False) / "config.json"
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _planned_pool(
    config: TrainConfig, device_type: str, pool: RolePool, roles: _Roles
) -> PoolMemory:
    ranks = len(pool.ranks)
    own = [role for role in TRAINING if role in pool.roles and role not in added_keys(config)]
    if base_is_in_actor(config) and ACTOR in own:  # the reference is the engine of the actor
        own = [role for role in own if role != REF]
    found = {role: roles.engine(role, ranks) for role in own}
    engines = {role: engine for role, engine in found.items() if engine is not None}
    generation = roles.generation(ranks) if ROLLOUT in pool.roles else None
    return pool_memory(config, device_type, pool, engines, generation)


def pool_memory(
    config: TrainConfig,
    device_type: str,
    pool: RolePool,
    engines: Mapping[str, TrainingMemory],
    generation: GenerationMemory | None,
) -> PoolMemory:
    """Return how much of what these engines need exists at once on a rank of the pool."""
    phases = _Phases(config, device_type, engines, generation, len(pool.ranks))
    return PoolMemory(
        pool=pool,
        engines=engines,
        generation=generation,
        phases=phases.bytes_of_each(lambda peak, _: peak),
        states=max(phases.bytes_of_each(lambda _, states: states).values()),
    )


_HEADS: dict[str, HeadKind] = {CRITIC: "value", REWARD_MODEL: "score"}
PASSES = {
    ACTOR: "old log-probabilities",
    REF: "reference log-probabilities",
    CRITIC: "values",
    REWARD_MODEL: "scores of the reward model",
}


def engine_settings(config: TrainConfig, role: str) -> EngineConfig:
    """Return the settings of the training engine of a role."""
    if role == REWARD_MODEL:  # a role of a user in its place has a section of another class
        return config.reward_model.engine
    policy = config.actor_rollout_ref
    return {
        ACTOR: policy.actor.engine,
        REF: policy.ref.engine,
        CRITIC: config.critic.engine,
    }[role]


@dataclass(frozen=True)
class _Phases:
    """The phases of a step in the processes of one pool."""

    config: TrainConfig
    device_type: str
    engines: Mapping[str, TrainingMemory]
    generation: GenerationMemory | None
    ranks: int

    def bytes_of_each(self, part: Callable[[int, int], int]) -> dict[str, int]:
        """Return phase → bytes.

        `part` receives what a call adds at most, and how much of it are whole or sharded gradients,
        and returns the one that is asked for.
        """
        policy = self.config.actor_rollout_ref
        found: dict[str, int] = {}
        if self.generation is not None:
            held = sum(self._held(role, generating=True) for role in self.engines)
            found["generation"] = held + self._rollout_weights + part(self.generation.peak, 0)
        for role, engine in self.engines.items():
            if engine.evaluate is not None and not (role == REF and policy.actor.reads_full_kl):
                peak = part(engine.evaluate_peak, 0)
                found[PASSES[role]] = self._others(role) + self._loaded(role, moments=False) + peak
            if engine.update is not None:
                peak = part(engine.backward_peak, engine.gradients)
                if role == ACTOR and policy.actor.reads_full_kl:
                    reference = self.engines.get(REF, engine)
                    peak += part(reference.evaluate_peak, 0)
                # Offloaded moments are on the device only while the parameters are updated.
                step = part(engine.step_peak, min(engine.gradients, engine.step_peak))
                found[f"update of the {role}"] = self._others(role) + max(
                    self._loaded(role, moments=False) + peak,
                    self._loaded(role, moments=True) + step,
                )
        if ACTOR in self.engines:
            # Before the first sync the rollout has weights of its own, also if it shares them then.
            own = self.generation.weights - self._rollout_weights if self.generation else 0
            loaded = self._loaded(ACTOR, moments=False)
            found["weight sync"] = self._others(ACTOR) + own + loaded + self._sync_buffers()
        if not found:  # all roles of the pool are uncounted, but its processes are not
            found["processes alone"] = 0
        process = PROCESS_BYTES["cpu" if self.device_type == "cpu" else "accelerator"]
        return {phase: process + size for phase, size in found.items()}

    def _sync_buffers(self) -> int:
        """Return the bytes of one whole weight in both dtypes, and of weights in flight."""
        engine = self.engines[ACTOR]
        weight = 8 * engine.largest_weight
        # No bucket is larger than the model, and larger weights are split.
        limit = self.config.actor_rollout_ref.rollout.weight_bucket_mb << 20
        bucket = min(limit, 4 * engine.weights)
        if self.generation is not None:
            # The buffers of two rounds, and the weights of two rounds that are not complete.
            return weight + (2 * bucket if self.ranks > 1 else 0)
        # On a CPU: one part is packed while the parts of two rounds are in the store.
        return weight + (3 * bucket if self.device_type == "cpu" else 0)

    def _others(self, own: str) -> int:
        """Return what the other roles hold while `own` computes."""
        held = sum(self._held(role) for role in self.engines if role != own)
        if self.generation is None or (self._turns and own in (ACTOR, REF)):
            return held
        return held + self._rollout_weights

    @property
    def _rollout_weights(self) -> int:
        """The bytes of the rollout's own copy. There is none where it uses the tensors of the
        actor: on one rank, if both are float32."""
        if self.generation is None:
            return 0
        rollout, actor = self.config.actor_rollout_ref.rollout, self.engines.get(ACTOR)
        own_dtype = "float32" if self.device_type == "cpu" else "bfloat16"
        dtype = own_dtype if rollout.dtype == "auto" else rollout.dtype
        shared = rollout.share_weights and rollout.name == "hf" and not rollout.take_turns
        if shared and self.ranks == 1 and dtype == "float32" and actor is not None:
            offloads = engine_settings(self.config, ACTOR).param_offload
            return self.generation.weights if offloads else 0
        return self.generation.weights

    def _held(self, role: str, *, generating: bool = False) -> int:
        """Return what a training engine holds while another role computes."""
        if generating and self._turns and role in (ACTOR, REF):
            return 0
        engine, settings = self.engines[role], engine_settings(self.config, role)
        offloads = self.device_type != "cpu"
        kept = engine.parameters + engine.kept
        parameters = 0 if offloads and settings.param_offload else kept
        return parameters + (0 if offloads and settings.optimizer_offload else engine.optimizer)

    def _loaded(self, role: str, *, moments: bool) -> int:
        """Return what a training engine holds while it computes."""
        engine, offloads = self.engines[role], self.device_type != "cpu"
        kept = not (offloads and engine_settings(self.config, role).optimizer_offload)
        return engine.parameters + engine.kept + (engine.optimizer if moments or kept else 0)

    @property
    def _turns(self) -> bool:
        return self.config.actor_rollout_ref.rollout.take_turns and self.device_type != "cpu"
