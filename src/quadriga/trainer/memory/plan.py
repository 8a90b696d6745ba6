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
from functools import cached_property
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
from quadriga.config.schema import (
    EngineConfig,
    ModelConfig,
    RolloutConfig,
    RolloutEngineConfig,
    TrainConfig,
)
from quadriga.data.pairs import PairLengths
from quadriga.engines import ENGINES, engine_memory
from quadriga.engines.base import HeadKind
from quadriga.engines.memory import Rows, TrainingUse
from quadriga.models.images import image_tokens
from quadriga.models.memory import Bytes, EngineMemory, largest
from quadriga.parallel.device import compute_dtype
from quadriga.rollout import rollout_of
from quadriga.rollout.memory import CONTEXT_BYTES, GenerationUse
from quadriga.trainer.memory.machine import GIB, device_limit
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


def gib(size: int, digits: int = 3) -> str:
    """Return bytes in GiB: "79.2", "0.0132"."""
    return f"{size / GIB:.{digits}g}"


@dataclass(frozen=True)
class PoolMemory:
    """The memory of the engines that share the ranks of a pool.

    Attributes:
        engines, settings: role -> its training engine.
        generation: the rollout engine, if the pool has it.
        syncs: the weights of the actor are sent to a rollout, in this pool or another one.
        full_kl: the update of the actor computes the reference too.
        evaluation: the phase of the actor without gradients.
    """

    pool: RolePool
    device_type: str
    engines: Mapping[str, EngineMemory]
    settings: Mapping[str, EngineConfig]
    generation: EngineMemory | None = None
    rollout: RolloutConfig = RolloutConfig()  # noqa: RUF009  # frozen
    syncs: bool = True
    full_kl: bool = False
    evaluation: str = _PASSES[ACTOR]

    @cached_property
    def phases(self) -> dict[str, Bytes]:
        """Phase -> what -> bytes that exist at once on the device of a rank."""
        processes = self.generation.processes if self.generation else 0
        # A rank that only sends requests to the process of an engine does not use the device.
        if not processes or self.engines or not self._on_accelerator:
            processes += 1
        size = PROCESS_BYTES["accelerator" if self._on_accelerator else "cpu"]
        # All roles of a pool can be uncounted, but its processes are not.
        found = dict(self._phases()) or {"processes alone": {}}
        return {name: {"processes": processes * size, **held} for name, held in found.items()}

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

    @property
    def host(self) -> int:
        """Bytes of a rank in the memory of the host of its accelerator: states that the settings
        keep there, or models that are loaded whole."""
        if not self._on_accelerator:
            return 0

        def kept(*released: str) -> int:
            return sum(
                engine.host
                + sum(engine.held.values())
                - (0 if role in released else sum(self._held(role).values()))
                for role, engine in self.engines.items()
            )

        engines, most = list(self.engines.values()), kept()
        if self.generation:
            engines.append(self.generation)
            if self._turns:
                most = max(kept(ACTOR, REF), most + self.generation.host)
        return PROCESS_BYTES["accelerator"] + max(most, *(engine.loading for engine in engines))

    @property
    def _on_accelerator(self) -> bool:
        """Whether states can be in other memory than that of the device."""
        return self.device_type != "cpu"

    @property
    def _turns(self) -> bool:
        """Whether rollout and training engines of the policy take turns on the device."""
        return self.rollout.take_turns and self._on_accelerator

    def _phases(self) -> Iterator[tuple[str, Bytes]]:
        if self.generation is not None:
            away = (ACTOR, REF) if self._turns else ()
            beside = [self._held(role) for role in self.engines if role not in away]
            own = _named(ROLLOUT, self._rollout_held(), self.generation.adds["generate"])
            yield "generation", _sum(*beside, own)
        for role, engine in self.engines.items():
            others, own = self._others(role), self._held(role, computing=True)
            full_kl = self.full_kl and role in (ACTOR, REF)
            if "evaluate" in engine.adds and not (full_kl and role == REF):
                phase = self.evaluation if role == ACTOR else _PASSES[role]
                yield phase, _sum(others, own, _named(role, engine.adds["evaluate"]))
            if "backward" in engine.adds:
                update = _sum(own, _named(role, engine.adds["backward"]))
                if full_kl:
                    reference = self.engines.get(REF, engine).adds.get("evaluate", {})
                    update = _sum(update, _named(REF, reference))
                # Offloaded states are on the device only in the step of the optimizer.
                step = _named(role, engine.held, engine.adds.get("step", {}))
                yield f"update of the {role}", _sum(others, largest(update, step))
        if ACTOR in self.engines and self.syncs:
            yield "weight sync", {**self._sync(), "weights in flight": self._in_flight()}

    def _held(self, role: str, *, computing: bool = False) -> Bytes:
        """Return what a training engine holds on the device while it or another role computes."""
        settings = self.settings[role]
        off = dict.fromkeys(self.engines[role].held, settings.param_offload and not computing)
        off[_STATES] = settings.optimizer_offload
        held = self.engines[role].held.items()
        return _named(role, {w: n for w, n in held if not (off[w] and self._on_accelerator)})

    def _others(self, own: str) -> Bytes:
        """Return what the other roles hold while `own` computes."""
        held = [self._held(role) for role in self.engines if role != own]
        rollout = {} if self._turns else _named(ROLLOUT, self._rollout_held())
        return _sum(*held, rollout)

    def _rollout_held(self) -> Bytes:
        """Return what the rollout holds itself. It uses the tensors of the actor where these are
        whole, but not for weights that adapters are merged into, or of another dtype."""
        if self.generation is None:
            return {}
        held, rollout, actor = self.generation.held, self.rollout, self.engines.get(ACTOR)
        if not (rollout.share_weights and self.generation.shares_weights):
            return held
        if rollout.take_turns or actor is None or not self._whole:
            return held
        settings = self.settings[ACTOR]
        if settings.param_offload or (settings.offload_policy and self._on_accelerator):
            return held
        device = torch.device("meta" if self._on_accelerator else "cpu")
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
        if not self._turns:
            return {**held, **own}
        # It was not released before the first sync, when there are no moments. Later vLLM and
        # SGLang get back the memory of their weights, and hf writes to host memory.
        states = [_named(role, engine.held) for role, engine in self.engines.items()]
        first = {what: n for what, n in _sum(*states, own).items() if not what.endswith(_STATES)}
        weights = 0 if self.generation.shares_weights else self.generation.held.get("weights", 0)
        return largest(first, _sum(held, {f"{ROLLOUT} weights": weights}))

    def _in_flight(self) -> int:
        """Return the bytes of one whole weight in both dtypes, and of weights in flight."""
        engine = self.engines[ACTOR]
        # No bucket is larger than the model, and larger weights are split.
        bucket = min(self.rollout.weight_bucket_mb << 20, 4 * sum(engine.weights.values()))
        if self.generation is not None:
            # The buffers of two rounds, and the weights of two rounds that are not complete.
            buckets = 0 if self._whole else 2
        else:  # on a CPU one part is packed while the parts of two rounds are in the store
            buckets = 0 if self._on_accelerator else 3
        return 8 * engine.largest_weight + buckets * bucket


def _named(role: str, *parts: Bytes) -> Bytes:
    return {f"{role} {what}": size for what, size in _sum(*parts).items()}


def _sum(*parts: Bytes) -> Bytes:
    found: Counter[str] = Counter()
    for part in parts:
        for what, size in part.items():
            found[what] += size
    return found


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


# The plan of each command.


def train_plan(config: TrainConfig, device_type: str) -> MemoryPlan:
    """Return the memory of a run of `quadriga train` whose settings were checked.

    Raises:
        ModelError: a model folder has no config of a suitable model.
    """
    uses, added, policy = uses_of_run(config), added_keys(config), config.actor_rollout_ref
    missing = _uncounted_images(policy.model)
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
            missing += _uncounted(role, engines[role])
        generation = None
        if ROLLOUT in pool.roles:
            generation = _train_generation(config, len(pool.ranks), device_type, missing)
        pools.append(
            PoolMemory(
                pool, device_type, engines, settings, generation, policy.rollout,
                full_kl=policy.actor.reads_full_kl,
            )
        )  # fmt: skip
    return MemoryPlan(device_type, tuple(pools), config.trainer.n_gpus_per_node, tuple(missing))


def _uncounted(role: str, engine: EngineMemory) -> list[str]:
    return [f"activations of the {role} ({engine.missing})"] if engine.missing else []


def _uncounted_images(model: ModelConfig) -> list[str]:
    takes = model.path and image_tokens(model.path, trust_remote_code=model.trust_remote_code)
    return ["activations of the image encoder, whose parameters are counted"] if takes else []


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
    plan, actor = batch_plan(config), config.actor_rollout_ref.actor
    if role == CRITIC:
        size = config.critic.ppo_micro_batch_size_per_gpu
        return _rows(config, plan.critic.mini_batch_per_rank, size)
    if role != ACTOR:
        return None
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
    uses, device = [], None if limit is None else limit.size
    for rows, samples, sampling in batches:
        count = rollout.rows_at_once(rows, ranks)
        uses.append(
            GenerationUse(
                count, math.ceil(count / samples), data.max_prompt_length,
                data.max_response_length, sampling, device_type, device,
            )
        )  # fmt: skip
    return _generation(rollout, policy.model, uses, missing)


def _generation(
    rollout: RolloutEngineConfig, model: ModelConfig, uses: list[GenerationUse], missing: list[str]
) -> EngineMemory | None:
    """Return the batch that needs most memory, and note what is not counted."""
    found = [rollout_of(rollout).memory(model, use) for use in uses]
    known = [memory for memory in found if memory is not None]
    if not known:
        missing.append(f"rollout (engine {rollout.name})")
        return None
    memory = max(known, key=lambda memory: memory.peak("generate"))
    missing += [memory.missing] if memory.missing else []
    return memory


def _one_pool(trainer: Any, *roles: str) -> RolePool:
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
    missing, generation, rollout = _uncounted(ACTOR, actor), None, RolloutConfig(dtype=engine.dtype)
    if prompts is not None:
        count = min(rollout.micro_batch_size, math.ceil(len(prompts) / ranks))
        generated = GenerationUse(
            count, count, prompts.longest, trainer.max_response_length, trainer.val_sampling,
            device_type,
        )  # fmt: skip
        generation = _generation(rollout, config.model, [generated], missing)
    table = PoolMemory(
        pool, device_type, {ACTOR: actor}, {ACTOR: engine}, generation, rollout,
        syncs=prompts is not None, evaluation="loss of the validation",
    )  # fmt: skip
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
    table = PoolMemory(pool, device_type, {REWARD_MODEL: memory}, {REWARD_MODEL: engine})
    missing = tuple(_uncounted(REWARD_MODEL, memory))
    return MemoryPlan(device_type, (table,), config.trainer.n_gpus_per_node, missing)


def generation_plan(
    config: GenerationConfig, device_type: str, prompts: PromptDataset | None = None
) -> MemoryPlan:
    """Return the memory of `quadriga generate` and `quadriga eval`, for the largest batch of these
    prompts; None: of the largest that the settings allow.

    Raises:
        ModelError: the model folder has no config of a causal language model.
    """
    trainer, missing = config.trainer, _uncounted_images(config.model)
    _, rows, longest = generated_rows(config, prompts)
    limit = device_limit(trainer_settings(trainer), device_type)
    use = GenerationUse(
        rows, math.ceil(rows / config.n), longest, config.max_response_length, config.sampling,
        device_type, None if limit is None else limit.size,
    )  # fmt: skip
    generation = _generation(config.rollout, config.model, [use], missing)
    table = PoolMemory(_one_pool(trainer, ROLLOUT), device_type, {}, {}, generation)
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
