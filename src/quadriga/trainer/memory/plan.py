"""What each role needs on a rank. A run fits if its largest phase (`phases`) fits."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import lru_cache

from quadriga.config.plan import UpdatePlan, batch_plan
from quadriga.config.role_ranks import RolePool, added_keys, base_is_in_actor, role_pools
from quadriga.config.schema import (
    DtypeName,
    EngineConfig,
    ModelConfig,
    OptimConfig,
    SamplingConfig,
    TrainConfig,
)
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
from quadriga.rollout.reserved import RESERVING, reserved_memory
from quadriga.trainer.checks.images import uncounted_images
from quadriga.trainer.memory.machine import device_limit
from quadriga.trainer.memory.phases import (
    ACTOR,
    CRITIC,
    REF,
    REWARD_MODEL,
    ROLLOUT,
    TRAINING,
    Part,
    PoolMemory,
    engine_settings,
    pool_memory,
)
from quadriga.trainer.roles.needed import (
    critic_model,
    needs_reference,
    reads_ref_log_prob,
    takes_old_log_probs_from_update,
    uses_of_run,
)
from quadriga.workers.objectives import entropy_use

_HEADS: dict[str, HeadKind] = {CRITIC: "value", REWARD_MODEL: "score"}


PoolsOfNode = list[tuple[PoolMemory, int, int]]
"""The pools with ranks on a node, the number of these ranks, and the bytes of one rank."""


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

    def largest_pool(self, part: Part) -> int:
        """Return the number of the pool that needs most of a part: on each rank of an accelerator,
        or in the memory of the fullest node."""
        if self.device_type != "cpu":
            sizes = [pool.bytes_of(part) for pool in self.pools]
            return sizes.index(max(sizes))
        pool, _, _ = max(self.fullest_node(part), key=lambda own: own[1] * own[2])
        return self.pools.index(pool)

    def fullest_node(self, part: Part) -> PoolsOfNode:
        """Return the pools of the node whose ranks need most of a part."""
        # 2 nodes of 4 ranks: the actor's pool has ranks 0 to 5, the critic's ranks 6 and 7.
        #
        #   node 0   actor 4
        #   node 1   actor 2   critic 2
        nodes: dict[int, PoolsOfNode] = {}
        for pool in self.pools:
            counts = Counter(rank // self.ranks_per_node for rank in pool.pool.ranks)
            for node, count in counts.items():
                nodes.setdefault(node, []).append((pool, count, pool.bytes_of(part)))
        return max(nodes.values(), key=total)


def total(pools: PoolsOfNode) -> int:
    """Return the bytes of all ranks of a node."""
    return sum(count * size for _, count, size in pools)


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
        own_pass = role == ACTOR and not takes_old_log_probs_from_update(self.config)
        if role == ACTOR and not own_pass and not base:
            return None
        if role == REF and not reads_ref_log_prob(self.config):
            rows = self._update_rows(ACTOR)  # computed in the micro-batches of the update
            return None if rows is None else replace(rows, entropy="unused")
        section = self.config.critic if role == CRITIC else actor
        size = engine.forward_rows(section.ppo_micro_batch_size_per_gpu)
        if role == REWARD_MODEL:
            size = self.config.reward_model.micro_batch_size_per_gpu
        sequences = self.batch.sequences * engine.model_parallel_size
        rows = self._rows(math.ceil(sequences / ranks), size)
        return replace(rows, entropy="value") if own_pass else rows

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
        if rollout.name in RESERVING:
            return self._reserved()
        if rollout.name != "hf":
            self.missing.append(f"rollout (engine {rollout.name})")
            return None
        batches = [self._generated(self.batch.sequences, ranks, rollout.n, rollout.sampling)]
        if config.data.val_files:
            rows = config.data.val_batch_size * rollout.val_n
            batches.append(self._generated(rows, ranks, rollout.val_n, rollout.val_sampling))
        memory = max(batches, key=lambda batch: batch.peak)
        if memory.uncounted:
            self.missing.append(f"KV cache and buffers of the rollout ({memory.uncounted})")
        return memory

    def _generated(
        self, rows: int, ranks: int, samples: int, sampling: SamplingConfig
    ) -> GenerationMemory:
        """Return the engine `hf` for a batch of `rows`, of which `samples` continue each prompt."""
        policy, data = self.config.actor_rollout_ref, self.config.data
        count = policy.rollout.rows_at_once(rows, ranks)
        prompts = math.ceil(count / samples)
        return planned_generation(
            policy.model,
            GeneratedRows(count, prompts, data.max_prompt_length, data.max_response_length),
            planned_sampling(sampling, data.max_response_length),
            policy.rollout.dtype,
            self.device_type,
        )

    def _reserved(self) -> GenerationMemory:
        config, rollout = self.config, self.config.actor_rollout_ref.rollout
        limit = device_limit(config.trainer, self.device_type)
        memory = reserved_memory(
            rollout,
            config.actor_rollout_ref.model,
            device_type=self.device_type,
            device=None if limit is None else limit.size,
            releasable=rollout.take_turns,
        )
        if memory.missing:
            self.missing.append(memory.missing)
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


def planned_generation(
    model: ModelConfig,
    rows: GeneratedRows,
    sampling: SamplingParams,
    dtype: DtypeName,
    device_type: str,
) -> GenerationMemory:
    """Return the memory of the engine `hf`, counted once for equal arguments."""
    return _generation_memory(_config_text(model), model, rows, sampling, dtype, device_type)


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
