"""The memory of a run, known before a process starts: one table of phase × what is held × bytes.

Each engine says what it holds and what its passes add (`models.memory.EngineMemory`). Roles of one
pool share the processes and the device of each rank. While one of them computes, the others hold
their parameters and optimizer states, unless the settings offload them:

    phase                  actor                      rollout         critic
    generation             parameters, states         weights, cache  parameters, states
    log-probabilities      … and activations          weights         parameters, states
    update of the actor    … and gradients            weights         parameters, states

vLLM and SGLang also keep their keys and values all the time. With `rollout.take_turns` the rollout
has nothing on an accelerator while others compute. A run fits if its largest phase fits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from quadriga.config.commands import GenerationConfig, RMConfig, SFTConfig
from quadriga.config.plan import batch_plan
from quadriga.config.role_ranks import (
    RolePool,
    added_keys,
    base_is_in_actor,
    role_pools,
    trainer_settings,
)
from quadriga.config.schema import EngineConfig, ModelConfig, RolloutConfig, RunConfig, TrainConfig
from quadriga.data.pairs import PairLengths
from quadriga.engines import ENGINES, engine_memory
from quadriga.engines.base import HeadKind
from quadriga.engines.memory import Rows, TrainingUse
from quadriga.models.memory import Bytes, EngineMemory
from quadriga.parallel.device import compute_dtype
from quadriga.rollout import rollout_of
from quadriga.rollout.memory import (
    CONTEXT_BYTES,
    GeneratedRows,
    GenerationUse,
    planned_sampling,
)
from quadriga.trainer.checks.data import takes_images
from quadriga.trainer.memory.machine import (
    GIB,
    device_limit,
)
from quadriga.trainer.roles.workers import (
    critic_model,
    needs_reference,
    reads_ref_log_prob,
    takes_old_log_probs_from_update,
    uses_of_run,
)
from quadriga.workers.updates import entropy_use

if TYPE_CHECKING:
    from quadriga.data import PromptDataset
    from quadriga.data.conversations import ConversationLengths

PROCESS_BYTES = {"cpu": GIB // 2, "accelerator": CONTEXT_BYTES}
"""What a rank needs beside tensors: Python and libraries; on an accelerator the context of the
device and the buffers of its collectives. Rounded figures, not measured for each machine."""
ACTOR, ROLLOUT, REF, CRITIC, REWARD_MODEL = "actor", "rollout", "ref", "critic", "reward_model"
_PASSES = {
    ACTOR: "log-probabilities",
    REF: "reference",
    CRITIC: "values",
    REWARD_MODEL: "scores",
}
"""Role -> its phase without gradients."""
_STATES = "optimizer states"
_NO_ROLLOUT = RolloutConfig()


def gib(size: int, digits: int = 3) -> str:
    """Return bytes in GiB: "79.2", "0.0132"."""
    return f"{size / GIB:.{digits}g}"


@dataclass(frozen=True)
class PoolMemory:
    """The table of one pool.

    Attributes:
        engines: role -> its training engine.
        generation: the rollout engine, if the pool has it.
        phases: phase -> what -> bytes that exist at once on the device of a rank.
        host: bytes in the host memory of a rank on an accelerator.
    """

    pool: RolePool
    engines: Mapping[str, EngineMemory]
    generation: EngineMemory | None
    phases: Mapping[str, Bytes]
    host: int

    @property
    def totals(self) -> dict[str, int]:
        """Phase -> bytes."""
        return {phase: sum(held.values()) for phase, held in self.phases.items()}

    @property
    def largest(self) -> tuple[str, int]:
        """The phase in which most bytes exist, and these bytes."""
        return max(self.totals.items(), key=lambda item: item[1])

    @property
    def arithmetic(self) -> str:
        """The sum of the largest phase: "update of the actor = 3 (actor gradients) + …"."""
        phase, total = self.largest
        held = sorted(self.phases[phase].items(), key=lambda item: -item[1])
        shown = [(what, size) for what, size in held if 50 * size >= total]
        rest = total - sum(size for _, size in shown)
        parts = [*shown, *([("other", rest)] if rest else [])]
        return f"{phase} = " + " + ".join(f"{gib(size)} ({what})" for what, size in parts)


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a run. `missing`: what is not counted, in words."""

    device_type: str
    pools: tuple[PoolMemory, ...]
    ranks_per_node: int
    missing: tuple[str, ...] = ()

    @property
    def needed(self) -> int:
        """Bytes of the rank that needs most on an accelerator; of all ranks of a node on a CPU."""
        return sum(count * pool.largest[1] for pool, count in self.fullest)

    @property
    def fullest(self) -> list[tuple[PoolMemory, int]]:
        """The pools of the node whose ranks need most, each with its ranks on this node; for an
        accelerator the pool whose ranks need most."""
        # 2 nodes of 4 ranks: the actor's pool has ranks 0 to 5, the critic's ranks 6 and 7.
        #
        #   node 0   actor 4
        #   node 1   actor 2   critic 2
        if self.device_type != "cpu":
            return [(max(self.pools, key=lambda pool: pool.largest[1]), 1)]
        return max(self._nodes(), key=lambda node: sum(n * p.largest[1] for p, n in node))

    @property
    def host(self) -> int:
        """Bytes in the memory of the host of an accelerator that needs most."""
        return max(sum(n * pool.host for pool, n in node) for node in self._nodes())

    def _nodes(self) -> list[list[tuple[PoolMemory, int]]]:
        nodes: dict[int, list[tuple[PoolMemory, int]]] = {}
        for pool in self.pools:
            counts = Counter(rank // self.ranks_per_node for rank in pool.pool.ranks)
            for node, count in counts.items():
                nodes.setdefault(node, []).append((pool, count))
        return list(nodes.values())


# What exists at once.


@dataclass(frozen=True)
class _Pool:
    """Engines that share the ranks of a pool.

    Attributes:
        syncs: whether the weights of the actor are sent to a rollout, in this pool or another one.
        full_kl: whether the update of the actor computes the reference too.
    """

    pool: RolePool
    device_type: str
    engines: Mapping[str, EngineMemory]
    settings: Mapping[str, EngineConfig]
    generation: EngineMemory | None = None
    rollout: RolloutConfig = _NO_ROLLOUT
    syncs: bool = True
    full_kl: bool = False

    def memory(self) -> PoolMemory:
        """Return the table of the pool."""
        processes = self.generation.processes if self.generation else 0
        # A rank that only sends requests to the process of an engine does not use the device.
        if not processes or self.engines or not self.on_accelerator:
            processes += 1
        size = PROCESS_BYTES["accelerator" if self.on_accelerator else "cpu"]
        process = {"processes": processes * size}
        # All roles of a pool can be uncounted, but its processes are not.
        phases = dict(self._phases()) or {"processes alone": {}}
        table = {name: {**process, **held} for name, held in phases.items()}
        return PoolMemory(self.pool, self.engines, self.generation, table, self._host())

    @property
    def on_accelerator(self) -> bool:
        """Whether states can be in other memory than that of the device."""
        return self.device_type != "cpu"

    @property
    def turns(self) -> bool:
        """Whether rollout and training engines of the policy take turns on the device."""
        return self.rollout.take_turns and self.on_accelerator

    def _phases(self) -> Iterator[tuple[str, Bytes]]:
        if self.generation is not None:
            away = (ACTOR, REF) if self.turns else ()
            beside = [self._held(role) for role in self.engines if role not in away]
            own = _named(ROLLOUT, self._rollout_held(), self.generation.adds["generate"])
            yield "generation", _sum(*beside, own)
        for role, engine in self.engines.items():
            others = self._others(role)
            full_kl = self.full_kl and role in (ACTOR, REF)
            if "evaluate" in engine.adds and not (full_kl and role == REF):
                held = _sum(
                    others, self._held(role, computing=True), _named(role, engine.adds["evaluate"])
                )
                yield _PASSES[role], held
            moments = []
            if "backward" in engine.adds:
                both = _named(role, engine.adds["backward"])
                if full_kl:
                    reference = self.engines.get(REF, engine)
                    both = _sum(both, _named(REF, reference.adds.get("evaluate", {})))
                moments.append(_sum(self._held(role, computing=True), both))
            if "step" in engine.adds:  # offloaded states are on the device only in this moment
                held = _named(role, engine.held, engine.adds["step"])
                moments.append(held)
            if moments:
                most = max(moments, key=lambda held: sum(held.values()))
                yield f"update of the {role}", _sum(others, most)
        if ACTOR in self.engines and self.syncs:
            yield "weight sync", _sum(self._sync(), {"weights in flight": self._sync_buffers()})

    def _held(self, role: str, *, computing: bool = False) -> Bytes:
        """Return what a training engine holds on the device while it or another role computes."""
        settings, on_device = self.settings[role], {}
        for what, size in self.engines[role].held.items():
            leaves = settings.param_offload and not computing
            if what == _STATES:
                leaves = settings.optimizer_offload
            if not (leaves and self.on_accelerator):
                on_device[what] = size
        return _named(role, on_device)

    def _others(self, own: str) -> Bytes:
        """Return what the other roles hold while `own` computes."""
        held = [self._held(role) for role in self.engines if role != own]
        rollout = {} if self.turns else _named(ROLLOUT, self._rollout_held())
        return _sum(*held, rollout)

    def _rollout_held(self) -> Bytes:
        """Return what the rollout holds itself. It uses the tensors of the actor where these are
        whole, but not for weights that adapters are merged into, or of another dtype."""
        if self.generation is None:
            return {}
        held, rollout, actor = self.generation.held, self.rollout, self.engines.get(ACTOR)
        shares = rollout.share_weights and rollout.name == "hf" and not rollout.take_turns
        if not shares or actor is None or not self._whole:
            return held
        settings = self.settings[ACTOR]
        if settings.param_offload or (settings.offload_policy and self.on_accelerator):
            return held
        device = torch.device("meta" if self.on_accelerator else "cpu")
        dtype = compute_dtype(rollout.dtype, device)
        own = sum(count for kept, count in actor.weights.items() if kept != dtype)
        return {"weights": min(own * dtype.itemsize, held["weights"])}

    @property
    def _whole(self) -> bool:
        """Whether each rank has whole weights of the actor."""
        settings = self.settings[ACTOR]
        one = settings.fsdp_size == 1 and settings.tensor_parallel_size == 1
        return len(self.pool.ranks) == 1 or one

    def _sync(self) -> Bytes:
        """Return what exists during a weight sync, without its buffers."""
        held = _sum(self._others(ACTOR), self._held(ACTOR, computing=True))
        if self.generation is None:
            return held
        # Before the first sync the rollout has weights of its own, also if it shares them then.
        own = _named(ROLLOUT, self.generation.held)
        if not self.turns:
            return {**held, **own}
        # It was not released before the first sync, when there are no moments. Later vLLM and
        # SGLang get back the memory of their weights, and hf writes to host memory.
        states = [_named(role, engine.held) for role, engine in self.engines.items()]
        first = {what: n for what, n in _sum(*states, own).items() if not what.endswith(_STATES)}
        weights = 0 if self.rollout.name == "hf" else self.generation.held.get("weights", 0)
        later = _sum(held, {f"{ROLLOUT} weights": weights})
        return max(first, later, key=lambda held: sum(held.values()))

    def _sync_buffers(self) -> int:
        """Return the bytes of one whole weight in both dtypes, and of weights in flight."""
        engine = self.engines[ACTOR]
        weight = 8 * engine.largest_weight
        # No bucket is larger than the model, and larger weights are split.
        bucket = min(self.rollout.weight_bucket_mb << 20, 4 * sum(engine.weights.values()))
        if self.generation is not None:
            # The buffers of two rounds, and the weights of two rounds that are not complete.
            return weight + (0 if self._whole else 2 * bucket)
        # On a CPU: one part is packed while the parts of two rounds are in the store.
        return weight + (0 if self.on_accelerator else 3 * bucket)

    def _host(self) -> int:
        """Return the most bytes of a rank in the memory of the host of its accelerator: states that
        the settings keep there, or models that are loaded whole."""
        if not self.on_accelerator:
            return 0
        states = {r: e.host + sum(e.held.values()) for r, e in self.engines.items()}
        kept = {role: size - sum(self._held(role).values()) for role, size in states.items()}
        total = sum(kept.values())
        if self.turns:
            kept |= {role: states[role] for role in (ACTOR, REF) if role in states}
            total = max(
                sum(kept.values()), total + (self.generation.host if self.generation else 0)
            )
        loading = max(
            engine.loading for engine in [*self.engines.values(), self.generation] if engine
        )
        return PROCESS_BYTES["accelerator"] + max(total, loading)


def _named(role: str, *parts: Bytes) -> Bytes:
    return {f"{role} {what}": size for what, size in _sum(*parts).items()}


def _sum(*parts: Bytes) -> Bytes:
    found: dict[str, int] = {}
    for part in parts:
        for what, size in part.items():
            found[what] = found.get(what, 0) + size
    return found


# The plan of each command.


def _uncounted(model: ModelConfig) -> list[str]:
    images = "activations of the image encoder, whose parameters are counted"
    return [images] if takes_images(model) else []


def train_plan(config: TrainConfig, device_type: str) -> MemoryPlan:
    """Return the memory of a run of `quadriga train` whose settings were checked.

    Raises:
        ModelError: a model folder has no config of a suitable model.
    """
    uses, added = uses_of_run(config), added_keys(config)
    missing = _uncounted(config.actor_rollout_ref.model)
    missing += [f"the added role {use}" for use in uses if use in added]
    pools = []
    for pool in role_pools(config, uses):
        engines, settings = {}, {}
        for role in (role for role in _PASSES if role in pool.roles and role not in added):
            # Adapters that are off make the actor the reference.
            if role == REF and base_is_in_actor(config) and ACTOR in pool.roles:
                continue
            settings[role] = _engine_settings(config, role)
            if settings[role].name not in ENGINES:
                missing.append(f"{role} (engine {settings[role].name})")
                continue
            model, use = _training_use(config, role, len(pool.ranks), device_type)
            engines[role] = engine_memory(model, settings[role], use)
            if engines[role].missing:
                missing.append(f"activations of the {role} ({engines[role].missing})")
        generation = None
        if ROLLOUT in pool.roles:
            generation = _train_generation(config, len(pool.ranks), device_type, missing)
        policy = config.actor_rollout_ref
        full_kl = policy.actor.reads_full_kl
        pools.append(
            _Pool(pool, device_type, engines, settings, generation, policy.rollout, True, full_kl)
        )
    tables = tuple(pool.memory() for pool in pools)
    return MemoryPlan(device_type, tables, config.trainer.n_gpus_per_node, tuple(missing))


def _engine_settings(config: TrainConfig, role: str) -> EngineConfig:
    policy = config.actor_rollout_ref
    if role == REWARD_MODEL:  # a role of a user in its place has a section of another class
        return config.reward_model.engine
    return {
        ACTOR: policy.actor.engine,
        REF: policy.ref.engine,
        CRITIC: config.critic.engine,
    }[role]


def _training_use(
    config: TrainConfig, role: str, ranks: int, device_type: str
) -> tuple[ModelConfig, TrainingUse]:
    policy = config.actor_rollout_ref
    head: HeadKind = "lm"
    model, optim = policy.model, policy.actor.optim
    if role == CRITIC:
        model, head, optim = critic_model(config), "value", config.critic.optim
    if role == REWARD_MODEL:
        model, head = config.reward_model.model, "score"
    update = update_rows(config, role)
    evaluate = evaluated_rows(config, role, ranks)
    return model, TrainingUse(head, ranks, device_type, update, evaluate, optim)


def update_rows(config: TrainConfig, role: str) -> Rows | None:
    """Return the rows of a rank in an optimizer step of a role; None if it is not trained."""
    if role not in (ACTOR, CRITIC):
        return None
    plan, actor = batch_plan(config), config.actor_rollout_ref.actor
    if role == CRITIC:
        size = config.critic.ppo_micro_batch_size_per_gpu
        return _rows(config, plan.critic.mini_batch_per_rank, size)
    rows = _rows(config, plan.actor.mini_batch_per_rank, actor.ppo_micro_batch_size_per_gpu)
    in_update = takes_old_log_probs_from_update(config)
    return replace(rows, entropy=entropy_use(actor, old_from_update=in_update))


def evaluated_rows(config: TrainConfig, role: str, ranks: int) -> Rows | None:
    """Return the rows of a rank in a pass of a role without gradients; None if it has none."""
    actor, engine = config.actor_rollout_ref.actor, _engine_settings(config, role)
    base = base_is_in_actor(config) and needs_reference(config)
    own_pass = role == ACTOR and not takes_old_log_probs_from_update(config)
    if role == ACTOR and not own_pass and not base:
        return None
    if role == REF and not reads_ref_log_prob(config):
        rows = update_rows(config, ACTOR)  # computed in the micro-batches of the update
        return None if rows is None else replace(rows, entropy="unused")
    section = config.critic if role == CRITIC else actor
    size = engine.forward_rows(section.ppo_micro_batch_size_per_gpu)
    if role == REWARD_MODEL:
        size = config.reward_model.micro_batch_size_per_gpu
    sequences = batch_plan(config).sequences * engine.model_parallel_size
    rows = _rows(config, math.ceil(sequences / ranks), size)
    return replace(rows, entropy="value") if own_pass else rows


def _rows(config: TrainConfig, count: int, micro_batch: int | None) -> Rows:
    data, samples = config.data, config.actor_rollout_ref.rollout.n
    # Rows of one prompt are neighbours only if their group is on one rank.
    shared = max(1, min(samples, count)) if config.trainer.balance_groups else 1
    return Rows(
        max(count, 1), data.max_prompt_length, data.max_response_length, shared, micro_batch
    )


def _train_generation(
    config: TrainConfig, ranks: int, device_type: str, missing: list[str]
) -> EngineMemory | None:
    policy, data = config.actor_rollout_ref, config.data
    rollout, limit = policy.rollout, device_limit(config.trainer, device_type)
    batches = [(batch_plan(config).sequences, rollout.n, rollout.sampling)]
    if data.val_files:
        rows = data.val_batch_size * rollout.val_n
        batches.append((rows, rollout.val_n, rollout.val_sampling))
    found = []
    for rows, samples, sampling in batches:
        count = rollout.rows_at_once(rows, ranks)
        use = GenerationUse(
            GeneratedRows(
                count, math.ceil(count / samples), data.max_prompt_length, data.max_response_length
            ),
            planned_sampling(sampling, data.max_response_length),
            device_type,
            None if limit is None else limit.size,
        )
        found.append(rollout_of(rollout).memory(policy.model, use))
    return _most(rollout.name, found, missing)


def _most(name: str, found: list[EngineMemory | None], missing: list[str]) -> EngineMemory | None:
    """Return the batch that needs most memory, and note what is not counted."""
    known = [memory for memory in found if memory is not None]
    if not known:
        missing.append(f"rollout (engine {name})")
        return None
    memory = max(known, key=lambda memory: memory.peak("generate"))
    missing += [memory.missing] if memory.missing else []
    return memory


def _one_pool(trainer: RunConfig | Any, *roles: str) -> RolePool:
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    return RolePool(roles, tuple(range(ranks)), (trainer.n_gpus_per_node,) * trainer.nnodes)


def sft_plan(
    config: SFTConfig,
    device_type: str,
    train: ConversationLengths,
    prompts: PromptDataset | None = None,
    evaluated: ConversationLengths | None = None,
) -> MemoryPlan:
    """Return the memory of a run of `quadriga sft` whose settings were checked.

    Args:
        train: the conversations that are trained.
        prompts: of a validation by responses; None: there is none.
        evaluated: the conversations of a validation by their loss; None: there is none.
    """
    trainer, engine, size = config.trainer, config.engine, config.data.micro_batch_size_per_gpu
    pool = _one_pool(trainer, ACTOR, *([] if prompts is None else [ROLLOUT]))
    ranks = len(pool.ranks)
    count = config.data.train_batch_size // (ranks // engine.model_parallel_size)
    update, evaluate = sft_rows(engine, train, max(1, count), size), None
    if evaluated is not None:
        # The rows of a batch are padded to a multiple of the ranks.
        rows = math.ceil(min(config.data.train_batch_size, evaluated.rows) / ranks)
        count, size = rows * engine.model_parallel_size, engine.forward_rows(size)
        evaluate = sft_rows(engine, evaluated, count, size)
    use = TrainingUse("lm", ranks, device_type, update, evaluate, config.optim)
    actor = engine_memory(config.model, engine, use)
    missing = [f"activations of the actor ({actor.missing})"] if actor.missing else []
    generation, rollout = None, RolloutConfig(dtype=engine.dtype)
    if prompts is not None:
        count = min(rollout.micro_batch_size, math.ceil(len(prompts) / ranks))
        response = trainer.max_response_length
        generated = GenerationUse(
            GeneratedRows(count, count, prompts.longest, response),
            planned_sampling(trainer.val_sampling, response),
            device_type,
        )
        found = rollout_of(rollout).memory(config.model, generated)
        generation = _most("hf", [found], missing)
    syncs = prompts is not None
    table = _Pool(
        pool, device_type, {ACTOR: actor}, {ACTOR: engine}, generation, rollout, syncs
    ).memory()
    names = {_PASSES[ACTOR]: "loss of the validation"}
    table = replace(table, phases={names.get(p, p): held for p, held in table.phases.items()})
    return MemoryPlan(device_type, (table,), trainer.n_gpus_per_node, tuple(missing))


def sft_rows(
    engine: EngineConfig, lengths: ConversationLengths, count: int, micro_batch: int | None
) -> Rows:
    """Return rows of the length of the longest, with as many targets as a micro-batch can have."""
    # Two rows of 900 + 100 and 10 + 950 tokens are planned as two of 50 + 950. If a budget of 3000
    # tokens limits a micro-batch, it can have many short rows of 1 + 99 tokens with 0.99 · 3000
    # targets: rows of 10 + 990 are planned.
    longest, targets = lengths.longest, lengths.targets
    together = min(count, micro_batch or count) * longest
    if engine.use_dynamic_bsz and together > engine.micro_batch_tokens:
        targets = math.ceil(lengths.share * longest)
    targets = min(max(targets, 1), longest - 1)
    return Rows(count, longest - targets, targets, micro_batch=micro_batch)


def rm_plan(config: RMConfig, device_type: str, lengths: PairLengths) -> MemoryPlan:
    """Return the memory of a run of `quadriga rm` whose settings were checked.

    `lengths`: of all pairs, the pairs of the validation included.
    """
    engine, size = config.engine, config.data.micro_batch_size_per_gpu
    pool = _one_pool(config.trainer, REWARD_MODEL)
    pairs = config.data.train_batch_size // (len(pool.ranks) // engine.model_parallel_size)
    # Each row has one more token than its conversation, and its prompt has one at least. The two
    # rows of a pair compute what they share once.
    prompt = max(1, lengths.longest - lengths.own)
    update = Rows(2 * max(1, pairs), prompt, lengths.longest + 1 - prompt, 2, size)
    evaluate = replace(update, micro_batch=engine.forward_rows(size))
    use = TrainingUse("score", len(pool.ranks), device_type, update, evaluate, config.optim)
    memory = engine_memory(config.model, engine, use)
    table = _Pool(pool, device_type, {REWARD_MODEL: memory}, {REWARD_MODEL: engine}).memory()
    missing = (f"activations ({memory.missing})",) if memory.missing else ()
    return MemoryPlan(device_type, (table,), config.trainer.n_gpus_per_node, missing)


def generation_plan(
    config: GenerationConfig, device_type: str, prompts: PromptDataset | None = None
) -> MemoryPlan:
    """Return the memory of `quadriga generate` and `quadriga eval`, for the largest batch of these
    prompts; None: of the largest that the settings allow.

    Raises:
        ModelError: the model folder has no config of a causal language model.
    """
    trainer, rollout = config.trainer, config.rollout
    pool = _one_pool(trainer, ROLLOUT)
    _, rows, longest = generated_rows(config, prompts)
    limit = device_limit(trainer_settings(trainer), device_type)
    use = GenerationUse(
        GeneratedRows(rows, math.ceil(rows / config.n), longest, config.max_response_length),
        planned_sampling(config.sampling, config.max_response_length),
        device_type,
        None if limit is None else limit.size,
    )
    missing = _uncounted(config.model)
    generation = _most(rollout.name, [rollout_of(rollout).memory(config.model, use)], missing)
    table = _Pool(pool, device_type, {}, {}, generation).memory()
    return MemoryPlan(device_type, (table,), trainer.n_gpus_per_node, tuple(missing))


def generated_rows(config: GenerationConfig, prompts: PromptDataset | None) -> tuple[int, int, int]:
    """Return the responses that one rank generates of a batch, how many of them at once, and the
    tokens of the longest prompt.

    Ranks that hold one copy of the weights together generate the same responses.
    """
    count = config.batch_size if prompts is None else min(config.batch_size, len(prompts))
    longest = config.max_prompt_length if prompts is None else prompts.longest
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    copies = max(1, ranks // rollout_of(config.rollout).ranks_of_copy)
    rows = count * config.n
    return math.ceil(rows / copies), config.rollout.rows_at_once(rows, copies), longest
