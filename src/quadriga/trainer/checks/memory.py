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

`RunMemory` prints the table of a command, and refuses a run that does not fit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from quadriga.config import schema
from quadriga.config.commands import GenerationConfig, RanksConfig, RMConfig, SFTConfig
from quadriga.config.plan import batch_plan
from quadriga.config.role_ranks import (
    RolePool,
    added_keys,
    base_is_in_actor,
    has_replicas,
    role_pools,
    trainer_settings,
)
from quadriga.data import PromptDataset
from quadriga.data.conversations import ConversationLengths, PairLengths
from quadriga.engines import engine_memory, kind_of
from quadriga.engines.memory import Rows, TrainingUse
from quadriga.errors import ConfigError
from quadriga.models.images import image_tokens
from quadriga.models.memory import Bytes, EngineMemory, largest
from quadriga.parallel.control_groups import available_memory
from quadriga.parallel.device import compute_dtype, planned_device, ranks_are_elsewhere
from quadriga.rollout import ROLLOUT_KEY, rollout_of
from quadriga.rollout.memory import CONTEXT_BYTES, GenerationUse
from quadriga.trainer.checks.settings import RoleEngine, fine_tuning_engine, role_engines
from quadriga.trainer.roles.needs import needs_reference, reads_ref_log_prob, uses_of_run
from quadriga.trainer.roles.workers import takes_old_log_probs_from_update
from quadriga.workers.updates import entropy_use

GIB = 2**30
PROCESS_BYTES = {"cpu": GIB // 2, "accelerator": CONTEXT_BYTES}
"""What a rank needs beside tensors: Python and libraries; on an accelerator the context of the
device and the buffers of its collectives. Rounded figures, not measured for each machine."""
ACTOR, ROLLOUT, REF, CRITIC, REWARD_MODEL = "actor", "rollout", "ref", "critic", "reward_model"
_PASSES = {ACTOR: "log-probabilities", REF: "reference", CRITIC: "values", REWARD_MODEL: "scores"}
"""Role -> its phase without gradients."""
_STATES = "optimizer states"
_COPIES = "copies of trained states"
_SNAPSHOT_COPIES = 3
"""Copies for snapshots: one that is sent, and two in a keeper."""


def gib(size: int) -> str:
    """Return bytes in GiB: "79.2", "0.0132"."""
    return f"{size / GIB:.3g}"


@dataclass(frozen=True)
class PoolMemory:
    """The memory of the engines that share the ranks of a pool.

    Attributes:
        engines, settings: role -> its training engine.
        generation: the rollout engine, if the pool has it.
        rollout_key: the section of the rollout, which can be in another pool; "" if there is none.
        full_kl: the update of the actor computes the reference too.
        copies: of the trained states, in host memory.
    """

    pool: RolePool
    device_type: str
    engines: Mapping[str, EngineMemory]
    settings: Mapping[str, RoleEngine]
    generation: EngineMemory | None = None
    rollout: schema.RolloutConfig = schema.RolloutConfig()  # noqa: RUF009  # frozen
    rollout_key: str = ""
    full_kl: bool = False
    copies: int = 0

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
        always = {"processes": processes * size}
        if not self._on_accelerator:
            always[_COPIES] = self.copied
        return {name: {**always, **held} for name, held in found.items()}

    @property
    def without_copies(self) -> str:
        """The change of settings without which there are fewer copies."""
        if self.copies >= _SNAPSHOT_COPIES:
            return "set trainer.snapshot_freq=0"
        return "set trainer.async_save=false"

    @property
    def copied(self) -> int:
        """Bytes of the copies of the trained states."""
        return self.copies * sum(engine.saved for engine in self.engines.values())

    @property
    def totals(self) -> dict[str, int]:
        """Phase -> bytes."""
        return {phase: sum(held.values()) for phase, held in self.phases.items()}

    @property
    def largest(self) -> tuple[str, int]:
        """The phase in which most bytes exist, and these bytes."""
        return max(self.totals.items(), key=lambda item: item[1])

    def text(self) -> str:
        """Return the ranks' roles and the sum of the largest phase, with its largest parts:
        "actor, rollout: update of the actor = 3 (actor gradients) + …"."""
        phase, total = self.largest
        shown = Counter(self.phases[phase]).most_common(3)
        rest = total - sum(size for _, size in shown)
        parts = [*shown, ("other", rest)] if rest else shown
        summands = " + ".join(f"{gib(size)} ({what})" for what, size in parts)
        return f"{', '.join(self.pool.roles)}: {phase} = {summands}"

    def table(self) -> list[str]:
        """Return a row for what is held, with a column for each phase."""
        whats = dict.fromkeys(what for held in self.phases.values() for what in held)
        rows = [(", ".join(self.pool.roles), list(self.phases))]
        for what in whats:
            sizes = [held.get(what, 0) for held in self.phases.values()]
            if any(sizes):
                rows.append((what, [gib(size) if size else "" for size in sizes]))
        rows.append(("all", [gib(size) for size in self.totals.values()]))
        widths = [max(10, len(phase) + 2) for phase in self.phases]
        lines = [f"  {title:<28}" + "".join(map(str.rjust, row, widths)) for title, row in rows]
        lines.append(f"  {'largest phase':<28}{self.largest[0]}")
        for role, engine in self.engines.items():
            for flag, off in engine.flags.items():
                lines.append(f"  {role}: {flag} {f'off: {off}' if off else 'on'}")
        return lines

    def remedies(self) -> Counter[str]:
        """Return changes of settings, with the bytes of the largest phase on which they act."""
        phase, held = self.largest[0], self.phases[self.largest[0]]
        found = Counter({self.without_copies: held.get(_COPIES, 0)})
        for role, memory in self.engines.items():
            of_role = self.settings[role]
            engine, key = of_role.engine, of_role.key
            activations, parameters, gradients, states = (
                held.get(f"{role} {what}", 0)
                for what in ("activations", "parameters", "gradients", _STATES)
            )
            updates = phase == f"update of the {role}"
            if updates and not of_role.model.gradient_checkpointing:
                found[f"set {of_role.model_key}.gradient_checkpointing=true"] = activations
            fewer = f"lower {key}.max_tokens_per_micro_batch={engine.max_tokens_per_micro_batch}"
            if not engine.use_dynamic_bsz:
                fewer = f"set {key}.use_dynamic_bsz=true and {fewer}"
            several = memory.rows.get("backward" if updates else "evaluate", 0) > 1
            found[fewer] = activations if several else 0
            hosts = self._on_accelerator and "offload_policy" in kind_of(engine).reads
            if hosts and not engine.offload_policy:
                found[f"set {key}.offload_policy=true"] = parameters + gradients + states
        if self.generation is not None and self.rollout_key:
            rows_at_once = ("micro_batch_size", self.rollout.micro_batch_size)
            name, value = self.generation.limit or rows_at_once
            rows = sum(held.get(f"{ROLLOUT} {what}", 0) for what in ("KV cache", "buffers"))
            lowers = self.generation.limit or value > 1
            found[f"lower {self.rollout_key}.{name}={value:g}"] = rows if lowers else 0
            if self._on_accelerator and ACTOR in self.engines and not self.rollout.take_turns:
                away = (ACTOR, REF) if phase == "generation" else (ROLLOUT,)
                released = sum(size for what, size in held.items() if what.startswith(away))
                found[f"set {self.rollout_key}.take_turns=true"] = released
        return +found  # without those that act on nothing

    @property
    def host(self) -> int:
        """Bytes of a rank in the memory of the host of its accelerator: states that the settings
        keep there, or models that are loaded whole."""
        if not self._on_accelerator:
            return 0
        whole = {role: e.host + sum(e.held.values()) for role, e in self.engines.items()}
        kept = {role: size - sum(self._held(role).values()) for role, size in whole.items()}
        most, loading = sum(kept.values()), [e.loading for e in self.engines.values()]
        if self.generation:
            loading.append(self.generation.loading)
            if self._turns:  # while the rollout generates, and while it is released
                away = {role: size for role, size in whole.items() if role in (ACTOR, REF)}
                most = max(sum((kept | away).values()), most + self.generation.host)
        return PROCESS_BYTES["accelerator"] + max(most + self.copied, *loading)

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
                yield _PASSES[role], _sum(others, own, _named(role, engine.adds["evaluate"]))
            if "backward" in engine.adds:
                update = _sum(own, _named(role, engine.adds["backward"]))
                if full_kl:
                    reference = self.engines.get(REF, engine).adds.get("evaluate", {})
                    update = _sum(update, _named(REF, reference))
                # Offloaded states are on the device only in the step of the optimizer.
                step = _named(role, engine.held, engine.adds.get("step", {}))
                yield f"update of the {role}", _sum(others, largest(update, step))
        if ACTOR in self.engines and (self.rollout_key or self.generation is not None):
            yield "weight sync", {**self._sync(), "weights in flight": self._in_flight()}

    def _held(self, role: str, *, computing: bool = False) -> Bytes:
        """Return what a training engine holds on the device while it or another role computes."""
        settings = self.settings[role].engine
        held = dict(self.engines[role].held)
        if self._on_accelerator and settings.optimizer_offload:
            held.pop(_STATES, None)
        if self._on_accelerator and settings.param_offload and not computing:
            held = {what: size for what, size in held.items() if what == _STATES}
        return _named(role, held)

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
        shared = rollout.share_weights and self.generation.shares_weights
        if actor is None or not shared or rollout.take_turns or not self._whole:
            return held
        settings = self.settings[ACTOR].engine
        if settings.param_offload or (settings.offload_policy and self._on_accelerator):
            return held
        device = torch.device("meta" if self._on_accelerator else "cpu")
        dtype = compute_dtype(rollout.dtype, device)
        own = sum(count for kept, count in actor.weights.items() if kept != dtype)
        return {"weights": min(own * dtype.itemsize, held["weights"])}

    @property
    def _whole(self) -> bool:
        """Whether each rank has whole weights of the actor."""
        settings = self.settings[ACTOR].engine
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
        found.update(part)  # adds the numbers
    return found


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a run. `uncounted`: what no engine counts, in words."""

    device_type: str
    pools: tuple[PoolMemory, ...]
    ranks_per_node: int
    uncounted: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """What is not counted, in words."""
        found = list(self.uncounted)
        for pool in self.pools:
            for role, engine in pool.engines.items():
                if engine.missing:
                    found.append(f"activations of the {role} ({engine.missing})")
            if pool.generation and pool.generation.missing:
                found.append(pool.generation.missing)
        return tuple(found)

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


def train_plan(config: schema.TrainConfig, device_type: str) -> MemoryPlan:
    """Return the memory of a run of `quadriga train` whose settings were checked.

    Raises:
        ModelError: a model folder has no config of a suitable model.
    """
    uses, added, policy = uses_of_run(config), added_keys(config), config.actor_rollout_ref
    shares = policy.rollout.share_weights and config.trainer.replay_order is None
    rollout = replace(policy.rollout, share_weights=shares)
    uncounted = _uncounted_images(policy.model)
    uncounted += [f"the added role {use}" for use in uses if use in added]
    trained = {found.role: found for found in role_engines(config) if found.role not in added}
    pools = []
    for pool in role_pools(config, uses):
        engines, ranks = {}, len(pool.ranks)
        for role in (role for role in trained if role in pool.roles):
            # Adapters that are off make the actor the reference.
            if role == REF and base_is_in_actor(config) and ACTOR in pool.roles:
                continue
            evaluated = evaluated_rows(config, role, trained[role].engine, ranks)
            engines[role] = _engine_memory(
                trained[role], ranks, device_type, update_rows(config, role), evaluated
            )
        pools.append(
            PoolMemory(
                pool, device_type, engines, trained,
                _train_generation(config, ranks, device_type) if ROLLOUT in pool.roles else None,
                rollout, ROLLOUT_KEY, full_kl=policy.actor.reads_full_kl,
                copies=state_copies(config.trainer),
            )
        )  # fmt: skip
    return MemoryPlan(device_type, tuple(pools), config.trainer.n_gpus_per_node, tuple(uncounted))


def state_copies(trainer: schema.RunConfig) -> int:
    """Return how many copies of its trained states a rank has in host memory."""
    saves_between = trainer.save_freq > 0 or trainer.save_interval_s is not None
    kept = _SNAPSHOT_COPIES if trainer.snapshot_freq else 0
    return kept + (trainer.async_save and saves_between)


def _engine_memory(
    found: RoleEngine, ranks: int, device_type: str, update: Rows | None, evaluate: Rows | None
) -> EngineMemory:
    use = TrainingUse(found.head, ranks, device_type, update, evaluate)
    return engine_memory(found.model, found.engine, use)


def _uncounted_images(model: schema.ModelConfig) -> list[str]:
    takes = model.path and image_tokens(model)
    return ["activations of the image encoder, whose parameters are counted"] if takes else []


def update_rows(config: schema.TrainConfig, role: str) -> Rows | None:
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


def evaluated_rows(
    config: schema.TrainConfig, role: str, engine: schema.EngineConfig, ranks: int
) -> Rows | None:
    """Return the rows of a rank in a pass of a role without gradients; None if it has none."""
    actor = config.actor_rollout_ref.actor
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


def _rows(config: schema.TrainConfig, count: int, micro_batch: int | None) -> Rows:
    data, samples = config.data, config.actor_rollout_ref.rollout.n
    # Rows of one prompt are neighbours only if their group is on one rank.
    shared = max(1, min(samples, count)) if config.trainer.balance_groups else 1
    return Rows(
        max(count, 1), data.max_prompt_length, data.max_response_length, shared, micro_batch
    )


def _train_generation(config: schema.TrainConfig, ranks: int, device_type: str) -> EngineMemory:
    """Return the memory of the batch that needs most: of training or of validation."""
    policy, data = config.actor_rollout_ref, config.data
    rollout, limit = policy.rollout, device_limit(config.trainer, device_type)
    prompt, response = data.max_prompt_length, data.max_response_length
    batches, keeps = [(batch_plan(config).sequences, rollout.n, rollout.sampling)], False
    staleness, agents = config.trainer.max_staleness, config.agent.path is not None
    if staleness or agents:
        # The rows of several steps are on their way. One that goes on is a prompt of its own.
        batches = [(batches[0][0] * (staleness + 1), 1, rollout.sampling)]
        # Rows that wait while another micro-batch or replica, or their environment, is at work.
        keeps = agents or not has_replicas(config) or config.trainer.replay_order is not None
        prompt, response = prompt + response - 1, min(response, rollout.slice_tokens)
    if data.val_files:
        rows = data.val_batch_size * rollout.val_n
        batches.append((rows, rollout.val_n, rollout.val_sampling))
    found: list[EngineMemory] = []
    for rows, samples, sampling in batches:
        count = rollout.rows_at_once(rows, ranks)
        kept = math.ceil(rows / ranks) - count if keeps and not found else 0
        if config.trainer.replay_order is None:
            kept = min(kept, count)
        use = GenerationUse(
            count, math.ceil(count / samples), prompt, response, sampling, device_type,
            limit[0] if limit else None, kept,
        )  # fmt: skip
        found.append(rollout_of(rollout).memory(policy.model, use))
    most = max(found, key=lambda memory: memory.peak("generate"))
    if rollout.update == "in_flight" and device_type == "cpu":  # of others in host memory
        return replace(most, held={**most.held, "weights in flight": most.held["weights"]})
    return most


def _one_pool(trainer: schema.MachineConfig, *roles: str) -> RolePool:
    return RolePool(roles, tuple(range(trainer.ranks)), (trainer.n_gpus_per_node,) * trainer.nnodes)


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
    actor = _engine_memory(fine_tuning_engine(config), ranks, device_type, update, evaluate)
    generation, rollout = None, schema.RolloutConfig(dtype=engine.dtype)
    if prompts is not None:
        count = min(rollout.micro_batch_size, math.ceil(len(prompts) / ranks))
        generated = GenerationUse(
            count, count, prompts.longest, trainer.max_response_length, trainer.val_sampling,
            device_type,
        )  # fmt: skip
        generation = rollout_of(rollout).memory(config.model, generated)
    table = PoolMemory(
        pool, device_type, {ACTOR: actor}, {ACTOR: fine_tuning_engine(config)}, generation,
        rollout, copies=state_copies(trainer),
    )  # fmt: skip
    return MemoryPlan(device_type, (table,), trainer.n_gpus_per_node)


def sft_rows(
    engine: schema.EngineConfig, lengths: ConversationLengths, count: int, micro_batch: int | None
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
    found, size = fine_tuning_engine(config), config.data.micro_batch_size_per_gpu
    pool, engine = _one_pool(config.trainer, REWARD_MODEL), config.engine
    pairs = config.data.train_batch_size // (len(pool.ranks) // engine.model_parallel_size)
    # Each row has one more token than its conversation, and its prompt has one at least. The two
    # rows of a pair compute what they share once.
    prompt = max(1, lengths.longest - lengths.own)
    update = Rows(2 * max(1, pairs), prompt, lengths.longest + 1 - prompt, 2, size)
    evaluate = replace(update, micro_batch=engine.forward_rows(size))
    memory = _engine_memory(found, len(pool.ranks), device_type, update, evaluate)
    copies, held = state_copies(config.trainer), {REWARD_MODEL: memory}
    table = PoolMemory(pool, device_type, held, {REWARD_MODEL: found}, copies=copies)
    return MemoryPlan(device_type, (table,), config.trainer.n_gpus_per_node)


def generation_plan(
    config: GenerationConfig, device_type: str, prompts: PromptDataset | None = None
) -> MemoryPlan:
    """Return the memory of `quadriga generate` and `quadriga eval`, for the largest batch of these
    prompts; None: of the largest that the settings allow.

    Raises:
        ModelError: the model folder has no config of a causal language model.
    """
    trainer = config.trainer
    of_rank, rows, longest = generated_rows(config, prompts)
    limit = device_limit(trainer_settings(trainer), device_type)
    response, kept, prompts_at_once = config.max_response_length, 0, math.ceil(rows / config.n)
    if config.agent.path is not None:  # a turn continues a row; others wait for environments
        longest, response = longest + response - 1, min(response, config.rollout.slice_tokens)
        kept, prompts_at_once = min(of_rank - rows, rows), rows
    use = GenerationUse(
        rows, prompts_at_once, longest, response, config.sampling,
        device_type, limit[0] if limit else None, kept,
    )  # fmt: skip
    generation = rollout_of(config.rollout).memory(config.model, use)
    rollout = schema.RolloutConfig(micro_batch_size=config.rollout.micro_batch_size)
    pool = _one_pool(trainer, ROLLOUT)
    table = PoolMemory(pool, device_type, {}, {}, generation, rollout, "rollout")
    uncounted = tuple(_uncounted_images(config.model))
    return MemoryPlan(device_type, (table,), trainer.n_gpus_per_node, uncounted)


def generated_rows(config: GenerationConfig, prompts: PromptDataset | None) -> tuple[int, int, int]:
    """Return the responses that one rank generates of a batch, how many of them at once, and the
    tokens of the longest prompt.

    Ranks that hold one copy of the weights together generate the same responses.
    """
    count = config.batch_size if prompts is None else min(config.batch_size, len(prompts))
    longest = config.max_prompt_length if prompts is None else prompts.longest
    copies = max(1, config.trainer.ranks // rollout_of(config.rollout).ranks_of_copy)
    rows = count * config.n
    return math.ceil(rows / copies), config.rollout.rows_at_once(rows, copies), longest


# The table, and the refusal of a run that does not fit.


def device_limit(trainer: schema.RunConfig, device_type: str) -> tuple[int, str] | None:
    """Return the bytes that ranks can use, and what says so; None: not known on this machine.

    On an accelerator the bytes are those of one rank, on a CPU of all ranks of a node.
    """
    if trainer.device_memory_gb is not None:
        return int(trainer.device_memory_gb * GIB), "trainer.device_memory_gb"
    if device_type == "cpu":
        # Other nodes are taken to be like this one.
        return available_memory(), "available on this machine"
    module = getattr(torch, device_type, None)
    if module is None or not module.is_available():
        return None
    properties = module.get_device_properties(0)
    return int(properties.total_memory), str(properties.name)


_COMMANDS: dict[type, tuple[Callable[..., MemoryPlan], str]] = {
    schema.TrainConfig: (train_plan, "plan"),
    SFTConfig: (sft_plan, "plan sft"),
    RMConfig: (rm_plan, "plan rm"),
    GenerationConfig: (generation_plan, "plan generate"),
}
"""Settings -> the function that plans a run, and the words after `quadriga` that show the plan."""


class RunMemory:
    """The memory of the run of a command.

    Args:
        data: what the function that plans the run needs beside the settings and the device.
    """

    def __init__(
        self, config: schema.TrainConfig | SFTConfig | RMConfig | GenerationConfig, *data: object
    ) -> None:
        self._config, self._data, ranks = config, data, config.trainer
        self._trainer = trainer_settings(ranks) if isinstance(ranks, RanksConfig) else ranks
        self._plan, self._command = next(
            found for kind, found in _COMMANDS.items() if isinstance(config, kind)
        )

    def check(self) -> None:
        """Check that the run fits the memory of its ranks and their hosts, where that is known.

        Raises:
            ConfigError: it does not fit. The message has the arithmetic, and says what to change.
        """
        device_type = planned_device(self._trainer)
        if not self._trainer.check_memory or device_type is None:
            return
        short, *changes = self._shortage(self._plan(self._config, device_type, *self._data))
        if short:
            raise ConfigError(
                f"{short}; {'; or '.join(changes)}; `quadriga {self._command}` shows all parts, "
                "and trainer.check_memory=false starts the run anyway",
                key="trainer.check_memory",
            )

    def text(self) -> str:
        """Return the plan as a table, and whether it fits.

        Raises:
            ModelError: the model folder has no config of a suitable model.
        """
        plan = self._plan(self._config, planned_device(self._trainer) or "cuda", *self._data)
        lines = [f"memory of one rank in GiB, device {plan.device_type}"]
        lines += [line for pool in plan.pools for line in pool.table()]
        if plan.missing:
            lines.append(f"  not counted: {'; '.join(plan.missing)}")
        if plan.device_type != "cpu":
            lines.append(f"  host memory of a node: {gib(plan.host)} GiB")
        limit = device_limit(self._trainer, plan.device_type)
        if limit is None:
            lines.append("  memory of the device: unknown; set trainer.device_memory_gb")
            return "\n".join(lines)
        lines.append(f"  {gib(limit[0])} GiB: {limit[1]}")
        short, *changes = self._shortage(plan)
        if short:
            lines += [f"  {short}", *(f"    {text}" for text in changes)]
        elif plan.missing:
            left = gib(limit[0] - plan.needed)
            lines.append(f"  what is counted fits; {left} GiB are left for what is not")
        else:
            lines.append("  the run fits")
        return "\n".join(lines)

    def _shortage(self, plan: MemoryPlan) -> list[str]:
        """Return why a plan does not fit, then changes of settings; [""] if it fits."""
        limit, on_cpu = device_limit(self._trainer, plan.device_type), plan.device_type == "cpu"
        if limit is not None and plan.needed > limit[0]:
            size, source = limit
            parts = " + ".join(
                f"{count} × {gib(pool.largest[1])} ({pool.text()})" for pool, count in plan.fullest
            )
            found = sum((pool.remedies() for pool, _ in plan.fullest), Counter[str]())
            best = [f"{what} (acts on {gib(n)} GiB)" for what, n in found.most_common(3)]
            if len(best) < 3:
                ranks = "use fewer ranks of a node" if on_cpu else "shard over more ranks"
                best.append(f"{ranks}, or use a smaller model")
            return [
                f"the run needs {gib(plan.needed)} GiB on a {'node' if on_cpu else 'device'}: "
                f"ranks × GiB = {parts}; this is {gib(plan.needed - size)} GiB more than "
                f"the {gib(size)} GiB there are ({source})",
                *best,
            ]
        if on_cpu or ranks_are_elsewhere(self._trainer) or plan.host <= available_memory():
            return [""]
        return [
            f"the ranks of a node need {gib(plan.host)} GiB of host memory for processes, copies "
            "of trained states, offloaded states and models while they are loaded, but "
            f"{gib(available_memory())} GiB are available on this machine",
            *{pool.without_copies for pool in plan.pools if pool.copied},
            "keep states on the devices, use fewer ranks of a node (trainer.n_gpus_per_node), or "
            "hosts with more memory",
        ]
