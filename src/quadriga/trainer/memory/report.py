"""The memory plan as a table, and the refusal of a run that does not fit."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from quadriga.config.schema import Checkpointing, ModelConfig, TrainConfig
from quadriga.engines.memory.states import TrainingMemory
from quadriga.errors import ConfigError, ModelError
from quadriga.trainer.memory.host import (
    HostSettings,
    host_limit,
    host_memory,
    host_remedies,
    host_settings,
    host_shortage,
)
from quadriga.trainer.memory.machine import DeviceLimit, device_limit, gib, planned_device
from quadriga.trainer.memory.phases import ACTOR, CRITIC, ROLLOUT, PoolMemory, engine_settings
from quadriga.trainer.memory.plan import MemoryPlan, memory_plan
from quadriga.trainer.memory.resharding import resharding_lines

Advice = Callable[[], Iterable[str]]
"""Returns what to change, most effective first."""


def check_memory(config: TrainConfig) -> None:
    """Check that a run fits the memory of its ranks, if the memory is known on this machine.

    Raises:
        ConfigError: it does not fit. The message has the arithmetic, and says what to change.
    """
    device_type = planned_device(config.trainer)
    if not config.trainer.check_memory or device_type is None:
        return
    plan = memory_plan(config, device_type)
    check_plan(plan, host_settings(config), lambda: remedies(config, plan), "plan")


def check_plan(plan: MemoryPlan, settings: HostSettings, advice: Advice, command: str) -> None:
    """Check that a plan fits the memory of the ranks and of their hosts, where that is known.

    Args:
        advice: what to change if it does not fit a device.
        command: the words after `quadriga` that show the plan.

    Raises:
        ConfigError: it does not fit. The message has the arithmetic, and says what to change.
    """
    limit = device_limit(settings.trainer, plan.device_type)
    short = None
    if limit is not None:
        short = shortage(plan, limit, states_only=True) or shortage(plan, limit)
    if short is None and (own := host_limit(settings.trainer, plan, limit)) is not None:
        memory = host_memory(settings, plan)
        short, advice = host_shortage(memory, own), partial(host_remedies, settings, memory)
    if short is not None:
        raise ConfigError(
            f"{short}; {'; or '.join(advice())}; `quadriga {command}` shows all parts, and "
            "trainer.check_memory=false starts the run anyway",
            key="trainer.check_memory",
        )


def shortage(plan: MemoryPlan, limit: DeviceLimit, *, states_only: bool = False) -> str | None:
    """Return why a plan does not fit, as a sentence without its end. None: it fits.

    `states_only`: count parameters, gradients and moments only.
    """
    if plan.device_type != "cpu":
        for pool in plan.pools:
            phase, size = pool.largest
            if states_only:
                phase, size = f"{_states([pool])} alone", pool.states
            if size > limit.size:
                return (
                    f"a rank of {', '.join(pool.pool.roles)} needs {gib(size)} GiB ({phase}), but "
                    f"its device has {gib(limit.size)} GiB ({limit.source})"
                )
        return None
    parts = max(_pools_of_nodes(plan, states_only), key=_total)
    if _total(parts) <= limit.size:
        return None
    sums = " + ".join(
        f"{count} × {gib(size)} ({', '.join(pool.pool.roles)})" for pool, count, size in parts
    )
    states = f"{_states([pool for pool, _, _ in parts])} alone need"
    return (
        f"{states if states_only else 'the run needs'} {gib(_total(parts))} GiB on a node: "
        f"ranks × GiB = {sums}; but {gib(limit.size)} GiB are {limit.source}"
    )


def _states(pools: Iterable[PoolMemory]) -> str:
    trained = any(pool.engines for pool in pools)
    return "parameters, gradients and optimizer states" if trained else "weights"


PoolsOfNode = list[tuple[PoolMemory, int, int]]
"""The pools with ranks on a node, the number of these ranks, and the bytes of one rank."""


def _pools_of_nodes(plan: MemoryPlan, states_only: bool) -> list[PoolsOfNode]:
    # 2 nodes of 4 ranks: the actor's pool has ranks 0 to 5, the critic's ranks 6 and 7.
    #
    #   node 0   actor 4
    #   node 1   actor 2   critic 2
    nodes: dict[int, PoolsOfNode] = {}
    for pool in plan.pools:
        size = pool.states if states_only else pool.largest[1]
        counts = Counter(rank // plan.ranks_per_node for rank in pool.pool.ranks)
        for node, count in counts.items():
            nodes.setdefault(node, []).append((pool, count, size))
    return list(nodes.values())


def _total(parts: PoolsOfNode) -> int:
    return sum(count * size for _, count, size in parts)


def remedies(config: TrainConfig, plan: MemoryPlan) -> list[str]:
    """Return what to change, most effective first, for the pool that needs most."""
    pool = max(plan.pools, key=lambda pool: pool.largest[1])
    phase, _ = pool.largest
    found = []
    rollout = config.actor_rollout_ref.rollout
    generation = pool.generation
    if generation is not None and generation.setting:
        if generation.reserved and (phase == "generation" or not rollout.take_turns):
            found.append(f"lower actor_rollout_ref.rollout.{generation.setting}")
    elif phase == "generation":
        found.append(f"lower actor_rollout_ref.rollout.micro_batch_size={rollout.micro_batch_size}")
    trained = {role: e.update_peak for role, e in pool.engines.items() if e.update is not None}
    if trained:
        role = max(trained, key=lambda role: trained[role])
        found += _training_remedies(config, plan, role, pool.engines[role])
    if plan.device_type != "cpu":
        together = pool.generation is not None and ACTOR in pool.engines
        if together and not rollout.take_turns:
            found.append("set actor_rollout_ref.rollout.take_turns=true")
        found.append("shard over more ranks (trainer.n_gpus_per_node, trainer.nnodes)")
    else:
        found.append("use fewer ranks of a node, or a smaller model")
    return found


def _training_remedies(
    config: TrainConfig, plan: MemoryPlan, role: str, engine: TrainingMemory
) -> list[str]:
    policy = config.actor_rollout_ref
    own = role == CRITIC and bool(config.critic.model.path)
    model, key = (config.critic.model, "critic") if own else (policy.model, "actor_rollout_ref")
    section, prefix = (
        (config.critic, "critic") if role == CRITIC else (policy.actor, "actor_rollout_ref.actor")
    )
    found = []
    assert engine.update is not None
    for form, other in _other_forms(config, plan.device_type, model.gradient_checkpointing).items():
        changed = _engine(other, role)
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
    elif section.optim.name == "adamw":
        found.append(f"set {prefix}.optim.name=adamw_8bit (a quarter of the optimizer states)")
    return found


FORMS: dict[str, Checkpointing] = {"true": True, "selective": "selective", "false": False}
"""Forms of activation checkpointing, as they are written, those with fewest bytes first."""


def _other_forms(
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


def _engine(plan: MemoryPlan, role: str) -> TrainingMemory | None:
    return next((p.engines[role] for p in plan.pools if role in p.engines), None)


def plan_text(config: TrainConfig) -> str:
    """Return the memory plan as a table, with every form of activation checkpointing.

    Raises:
        ModelError: a model folder has no config of a suitable model.
    """
    device_type = planned_device(config.trainer)
    shown = device_type or "cuda"
    plan = memory_plan(config, shown)
    current = config.actor_rollout_ref.model.gradient_checkpointing
    others = _other_forms(config, shown, current)
    lines = plan_lines(plan, host_settings(config), lambda: remedies(config, plan), others)
    return "\n".join([*lines, *resharding_lines(config, shown)])


def plan_lines(
    plan: MemoryPlan,
    settings: HostSettings,
    advice: Advice,
    others: Mapping[str, MemoryPlan] | None = None,
) -> list[str]:
    """Return a plan as lines of a table, with the host memory, and whether it fits.

    Args:
        advice: what to change, if it does not fit a device.
        others: form of activation checkpointing -> the plan with it.
    """
    limit = device_limit(settings.trainer, plan.device_type)
    memory, own = host_memory(settings, plan), host_limit(settings.trainer, plan, limit)
    lines = [
        *_table_lines(plan, limit, advice, others or {}),
        "host memory of a node in GiB, all ranks",
    ]
    lines += [f"  {name:<36}{gib(size):>10}" for name, size in memory.parts.items()]
    lines += [f"  {role} is loaded whole: {reason}" for role, reason in memory.whole.items()]
    short = None if own is None else host_shortage(memory, own)
    if short is None:
        return lines
    return [*lines, f"  {short}", *(f"    {text}" for text in host_remedies(settings, memory))]


def _table_lines(
    plan: MemoryPlan,
    limit: DeviceLimit | None,
    advice: Advice,
    others: Mapping[str, MemoryPlan],
) -> list[str]:
    lines = [f"memory of one rank in GiB, device {plan.device_type}"]
    for pool in plan.pools:
        lines += _pool_lines(pool, others)
    if plan.missing:
        lines.append(f"  not counted: {'; '.join(plan.missing)}")
    if limit is None:
        return [*lines, "  memory of the device: unknown; set trainer.device_memory_gb"]
    short = shortage(plan, limit)
    lines.append(f"  {gib(limit.size)} GiB: {limit.source}")
    if short is None:
        return [*lines, "  the run fits" if not plan.missing else f"  {_left(plan, limit)}"]
    return [*lines, f"  {short}", *(f"    {text}" for text in advice())]


def _left(plan: MemoryPlan, limit: DeviceLimit) -> str:
    """Return how much memory is left for what is not counted, as a sentence without its end."""
    if plan.device_type == "cpu":
        used = max(map(_total, _pools_of_nodes(plan, states_only=False)))
    else:
        used = max(pool.largest[1] for pool in plan.pools)
    return f"what is counted fits; {gib(limit.size - used)} GiB are left for what is not"


def _pool_lines(pool: PoolMemory, others: Mapping[str, MemoryPlan]) -> list[str]:
    roles = [role for role in pool.pool.roles if role in pool.engines or role == ROLLOUT]
    rows: list[tuple[str, Sequence[int | None]]] = []

    def add(name: str, values: Iterable[int | None]) -> None:
        values = list(values)
        if any(values):
            rows.append((name, values))

    engines = [pool.engines.get(role) for role in roles]
    updates = [None if e is None else e.update or e.evaluate for e in engines]
    generation = [pool.generation if role == ROLLOUT else None for role in roles]
    trained = [None if e is None or e.update is None else e for e in engines]
    weights = [g.weights if g else e.parameters if e else None
               for e, g in zip(engines, generation, strict=True)]  # fmt: skip
    add("parameters", weights)
    add("gathered parameters", (None if e is None else e.gathered for e in engines))
    add("gradients", (None if e is None else e.gradients + e.kept for e in trained))
    add("optimizer states", (None if e is None else e.optimizer for e in trained))
    add("  in host memory", (None if e is None else e.on_host for e in engines))
    add("buffers of collectives", (None if e is None else e.buffers for e in engines))
    add("activations", (None if u is None else u.activations for u in updates))
    for form, other in others.items():
        unlike = [_engine(other, role) for role in roles]
        changed = [None if e is None else e.update for e in unlike]
        add(f"  checkpointing={form}", (None if u is None else u.activations for u in changed))
    add("  of them logits", (None if u is None else u.logits for u in updates))
    add("sent to gather weights", (None if e is None else e.sent.gathers for e in engines))
    add("sent to reduce gradients", (None if e is None else e.sent.reduction for e in trained))
    add("sent to ranks of a group", (None if u is None else u.exchanged for u in updates))
    add("KV cache", (None if g is None else g.kv_cache for g in generation))
    add("  with other buffers", (None if g is None else g.peak for g in generation))
    lines = [
        f"  {'':<26}" + "".join(f"{role:>10}" for role in roles),
        *(
            f"  {name:<26}" + "".join(f"{gib(v) if v else '':>10}" for v in values)
            for name, values in rows
        ),
    ]
    largest, _ = pool.largest
    lines += [
        f"  {phase:<26}{gib(size):>10}" + (" ← most" if phase == largest else "")
        for phase, size in pool.phases.items()
    ]
    return lines


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
