"""The memory plan as a table, and the refusal of a run that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from quadriga.config.schema import TrainConfig
from quadriga.engines.memory.passes import passes_counted_once
from quadriga.errors import ConfigError
from quadriga.trainer.memory.host import (
    HostSettings,
    host_limit,
    host_memory,
    host_remedies,
    host_settings,
    host_shortage,
)
from quadriga.trainer.memory.machine import (
    SETTING,
    DeviceLimit,
    device_limit,
    gib,
    gib_apart,
    planned_device,
)
from quadriga.trainer.memory.phases import ROLLOUT, Part, PoolMemory
from quadriga.trainer.memory.plan import MemoryPlan, memory_plan, total
from quadriga.trainer.memory.remedies import engine_of, other_forms, remedies
from quadriga.trainer.memory.resharding import resharding_lines

Advice = Callable[[Part], Iterable[str]]
"""Returns what to change, most effective first, if this part of a plan is too large."""


@passes_counted_once()
def check_memory(config: TrainConfig) -> None:
    """Check that a run fits the memory of its ranks, if the memory is known on this machine.

    Raises:
        ConfigError: it does not fit. The message has the arithmetic, and says what to change.
    """
    device_type = planned_device(config.trainer)
    if not config.trainer.check_memory or device_type is None:
        return
    plan = memory_plan(config, device_type)
    check_plan(plan, host_settings(config), partial(remedies, config, plan), "plan")


def check_plan(plan: MemoryPlan, settings: HostSettings, advice: Advice, command: str) -> None:
    """Check that a plan fits the memory of the ranks and of their hosts, where that is known.

    Args:
        advice: what to change if it does not fit a device.
        command: the words after `quadriga` that show the plan.

    Raises:
        ConfigError: it does not fit. The message has the arithmetic, and says what to change.
    """
    limit = device_limit(settings.trainer, plan.device_type)
    short, found = (None, []) if limit is None else _shortage_and_advice(plan, limit, advice)
    if short is None and (own := host_limit(settings.trainer, plan, limit)) is not None:
        memory = host_memory(settings, plan)
        short, found = host_shortage(memory, own), list(host_remedies(settings, memory))
    if short is not None:
        raise ConfigError(
            f"{short}; {'; or '.join(found)}; `quadriga {command}` shows all parts, and "
            "trainer.check_memory=false starts the run anyway",
            key="trainer.check_memory",
        )


def _shortage_and_advice(
    plan: MemoryPlan, limit: DeviceLimit, advice: Advice
) -> tuple[str | None, list[str]]:
    """Return why a plan does not fit, and what can help; (None, []) if it fits.

    The smallest part that does not fit is named: a smaller batch makes no room for parameters.
    """
    parts: tuple[Part, ...] = ("processes", "states", "all")
    for part in parts:
        short = shortage(plan, limit, part)
        if short is not None:
            return short, _for_processes(plan, limit) if part == "processes" else [*advice(part)]
    return None, []


def _for_processes(plan: MemoryPlan, limit: DeviceLimit) -> list[str]:
    """Return what helps if a model without parameters would not fit either."""
    found = []
    if limit.source == SETTING:
        found.append(f"raise {SETTING}")
    if plan.device_type != "cpu":
        return [*found, "use devices with more memory"]
    if plan.ranks_per_node > 1:
        found.append("use fewer ranks of a node (trainer.n_gpus_per_node)")
    return [*found, "use machines with more memory"]


def shortage(plan: MemoryPlan, limit: DeviceLimit, part: Part = "all") -> str | None:
    """Return why a part of a plan does not fit, as a sentence without its end. None: it fits."""
    if plan.device_type != "cpu":
        pool = plan.pools[plan.largest_pool(part)]
        size = pool.bytes_of(part)
        if size <= limit.size:
            return None
        phase = pool.largest[0] if part == "all" else f"{_counted(part, [pool])} alone"
        needed, given = gib_apart(size, limit.size)
        return (
            f"a rank of {', '.join(pool.pool.roles)} needs {needed} GiB ({phase}), but its "
            f"device has {given} GiB ({limit.source})"
        )
    parts = plan.fullest_node(part)
    if total(parts) <= limit.size:
        return None
    sums = " + ".join(
        f"{count} × {gib(size)} ({', '.join(pool.pool.roles)}, of which {gib(pool.processes)} "
        "the process)"
        for pool, count, size in parts
    )
    alone = f"{_counted(part, [pool for pool, _, _ in parts])} alone need"
    needed, given = gib_apart(total(parts), limit.size)
    return (
        f"{'the run needs' if part == 'all' else alone} {needed} GiB on a node: "
        f"ranks × GiB = {sums}; but {given} GiB are {limit.source}"
    )


def _counted(part: Part, pools: Iterable[PoolMemory]) -> str:
    if part == "processes":
        return "the processes"
    trained = any(pool.engines for pool in pools)
    return f"processes, {'parameters, gradients and optimizer states' if trained else 'weights'}"


@passes_counted_once()
def plan_text(config: TrainConfig) -> str:
    """Return the memory plan as a table, with every form of activation checkpointing.

    Raises:
        ModelError: a model folder has no config of a suitable model.
    """
    device_type = planned_device(config.trainer)
    shown = device_type or "cuda"
    plan = memory_plan(config, shown)
    current = config.actor_rollout_ref.model.gradient_checkpointing
    others = other_forms(config, shown, current)
    lines = plan_lines(plan, host_settings(config), partial(remedies, config, plan), others)
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
    short, found = _shortage_and_advice(plan, limit, advice)
    lines.append(f"  {gib(limit.size)} GiB: {limit.source}")
    if short is None:
        return [*lines, "  the run fits" if not plan.missing else f"  {_left(plan, limit)}"]
    return [*lines, f"  {short}", *(f"    {text}" for text in found)]


def _left(plan: MemoryPlan, limit: DeviceLimit) -> str:
    """Return how much memory is left for what is not counted, as a sentence without its end."""
    if plan.device_type == "cpu":
        used = total(plan.fullest_node("all"))
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
        unlike = [engine_of(other, role) for role in roles]
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
