"""The memory plan of a command as a table, and the refusal of a run that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from quadriga.config.commands import GenerationConfig, RanksConfig, RMConfig, SFTConfig
from quadriga.config.role_ranks import trainer_settings
from quadriga.config.schema import TrainConfig
from quadriga.engines import kind_of
from quadriga.errors import ConfigError, ModelError
from quadriga.parallel.device import planned_device, ranks_are_elsewhere
from quadriga.trainer.memory.machine import available_memory, device_limit
from quadriga.trainer.memory.plan import (
    MemoryPlan,
    PoolMemory,
    generation_plan,
    gib,
    rm_plan,
    sft_plan,
    train_plan,
)

_POLICY = "actor_rollout_ref"
_COMMANDS: dict[type, tuple[Callable[..., MemoryPlan], str, tuple[str, ...]]] = {
    TrainConfig: (
        train_plan,
        "plan",
        (_POLICY, *(f"{_POLICY}.{role}" for role in ("actor", "ref", "rollout")), "critic",
         "reward_model"),
    ),
    SFTConfig: (sft_plan, "plan sft", ("", "data")),
    RMConfig: (rm_plan, "plan rm", ("", "data")),
    GenerationConfig: (generation_plan, "plan generate", ("", "rollout")),
}  # fmt: skip
"""Settings -> the function that plans a run, the words after `quadriga` that show the plan, and the
sections of the settings in which a remedy is looked for."""
_TRIALS: dict[str, Any] = {
    "model.gradient_checkpointing": True,
    "engine.offload_policy": True,
    "optim.name": "adamw_8bit",
    "take_turns": True,
    "engine.max_tokens_per_micro_batch": 1,
    "ppo_micro_batch_size_per_gpu": 1,
    "micro_batch_size_per_gpu": 1,
    "micro_batch_size": 1,
    "max_response_length": 1,
    "engine.tensor_parallel_size": 0,
}
"""Name of a setting in a section -> the value with which it needs least memory."""
_ABSENT = object()


class RunMemory:
    """The memory of the run of a command.

    Args:
        data: what the function that plans the run needs beside the settings and the device.
    """

    def __init__(
        self, config: TrainConfig | SFTConfig | RMConfig | GenerationConfig, *data: object
    ) -> None:
        self._config, self._data = config, data
        ranks = config.trainer
        self._trainer = trainer_settings(ranks) if isinstance(ranks, RanksConfig) else ranks
        self._plan, self._command, self._sections = next(
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
        plan = self._plan(self._config, device_type, *self._data)
        short = self._shortage(plan)
        if short:
            raise ConfigError(
                f"{short}; {'; or '.join(self.remedies(plan))}; `quadriga {self._command}` shows "
                "all parts, and trainer.check_memory=false starts the run anyway",
                key="trainer.check_memory",
            )

    def text(self) -> str:
        """Return the plan as a table, and whether it fits.

        Raises:
            ModelError: the model folder has no config of a suitable model.
        """
        plan = self._plan(self._config, planned_device(self._trainer) or "cuda", *self._data)
        lines = [f"memory of one rank in GiB, device {plan.device_type}"]
        lines += [line for pool in plan.pools for line in table_lines(pool)]
        if plan.missing:
            lines.append(f"  not counted: {'; '.join(plan.missing)}")
        if plan.device_type != "cpu":
            lines.append(f"  host memory of a node: {gib(plan.host)} GiB")
        limit = device_limit(self._trainer, plan.device_type)
        if limit is None:
            lines.append("  memory of the device: unknown; set trainer.device_memory_gb")
            return "\n".join(lines)
        lines.append(f"  {gib(limit.size)} GiB: {limit.source}")
        short = self._shortage(plan)
        if short:
            lines += [f"  {short}", *(f"    {text}" for text in self.remedies(plan))]
        elif plan.missing:
            left = gib(limit.size - plan.needed)
            lines.append(f"  what is counted fits; {left} GiB are left for what is not")
        else:
            lines.append("  the run fits")
        return "\n".join(lines)

    def _shortage(self, plan: MemoryPlan) -> str:
        """Return why a plan does not fit, as a sentence without its end; "" if it fits."""
        limit = device_limit(self._trainer, plan.device_type)
        if limit is not None and plan.needed > limit.size:
            needed, given = _apart(plan.needed, limit.size)
            if plan.device_type != "cpu":
                ((pool, _),) = plan.fullest
                return (
                    f"a rank of {', '.join(pool.pool.roles)} needs {needed} GiB "
                    f"({pool.arithmetic}), but its device has {given} GiB ({limit.source})"
                )
            parts = " + ".join(
                f"{count} × {gib(pool.largest[1])} ({', '.join(pool.pool.roles)}: "
                f"{pool.arithmetic})"
                for pool, count in plan.fullest
            )
            return (
                f"the run needs {needed} GiB on a node: ranks × GiB = {parts}; but {given} GiB "
                f"are {limit.source}"
            )
        if plan.device_type == "cpu" or ranks_are_elsewhere(self._trainer):
            return ""
        host = available_memory()
        if plan.host <= host:
            return ""
        needed, given = _apart(plan.host, host)
        return (
            f"the ranks of a node need {needed} GiB of host memory for processes, offloaded states "
            f"and models while they are loaded, but {given} GiB are available on this machine"
        )

    def remedies(self, plan: MemoryPlan) -> list[str]:
        """Return at most three changes, most effective first. All of them lower what is needed."""
        limit = device_limit(self._trainer, plan.device_type)
        if limit is not None and plan.needed <= limit.size:
            return ["keep states on the devices, use fewer ranks of a node "
                    "(trainer.n_gpus_per_node), or hosts with more memory"]  # fmt: skip
        found = []
        for key, now, trial in self._candidates(plan):
            try:
                config = _changed(self._config, key, trial)
                other = self._plan(config, plan.device_type, *self._data)
            except (ConfigError, ModelError):  # no layers to checkpoint, other ranks
                continue
            if other.needed < plan.needed:
                before, after = _apart(plan.needed, other.needed)
                effect = f"({before} → {after} GiB"
                if isinstance(now, bool | str) or key.endswith("parallel_size"):
                    text = f"set {key}={str(trial).lower()} {effect})"
                else:
                    with_ = "with one row in each" if trial == 1 else f"with {trial:g}"
                    verb = f"set {key}" if now is None else f"lower {key}={now:g}"
                    text = f"{verb} {effect} {with_})"
                found.append((other.needed, text))
        best = [text for _, text in sorted(found)[:3]]
        more = "use fewer ranks of a node, or " if plan.ranks_per_node > 1 else "use "
        if plan.device_type != "cpu":
            more = "shard over more ranks (trainer.n_gpus_per_node, trainer.nnodes), or use "
        return best if len(best) == 3 else [*best, f"{more}a smaller model"]

    def _candidates(self, plan: MemoryPlan) -> Iterator[tuple[str, Any, Any]]:
        """Yield settings, with their values, and other values that can lower what is needed."""
        for section in self._sections:
            for name, trial in _TRIALS.items():
                key = f"{section}.{name}".lstrip(".")
                now = _value(self._config, key)
                if now is _ABSENT or now == trial or (name == "optim.name" and now != "adamw"):
                    continue
                if name == "engine.tensor_parallel_size":
                    trial, engine = 2 * now, _value(self._config, f"{section}.engine".lstrip("."))
                    ranks = self._trainer.nnodes * self._trainer.n_gpus_per_node
                    stages = kind_of(engine).in_stages
                    if not stages or ranks % (2 * engine.model_parallel_size):
                        continue
                yield key, now, max(1, now // 2) if name == "max_response_length" else trial
        for pool in plan.pools:
            if pool.generation is not None and pool.generation.limit is not None:
                name, value = pool.generation.limit
                section = next(s for s in self._sections if s.endswith("rollout"))
                yield f"{section}.{name}", value, type(value)(value / 2)


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        mapping = isinstance(config, Mapping)
        config = config.get(name, _ABSENT) if mapping else getattr(config, name, _ABSENT)
    return config


def _changed(config: Any, key: str, value: object) -> Any:
    """Return the same settings with another value at a dotted key."""
    name, _, rest = key.partition(".")
    if rest:
        value = _changed(_value(config, name), rest, value)
    change = {name: value}
    return {**config, **change} if isinstance(config, Mapping) else replace(config, **change)


def _apart(needed: int, limit: int) -> tuple[str, str]:
    """Return two sizes with as many digits as show which one is larger: "80.04" and "80"."""
    digits = next((n for n in range(3, 17) if gib(needed, n) != gib(limit, n)), 17)
    return gib(needed, digits), gib(limit, digits)


def table_lines(pool: PoolMemory) -> list[str]:
    """Return the table of a pool: a row for what is held, a column for each phase."""
    whats = dict.fromkeys(what for held in pool.phases.values() for what in held)
    rows = {what: [held.get(what, 0) for held in pool.phases.values()] for what in whats}
    table = [(", ".join(pool.pool.roles), list(pool.phases))]
    table += [
        (what, [gib(size) if size else "" for size in sizes])
        for what, sizes in rows.items()
        if any(sizes)
    ]
    table.append(("all", [gib(size) for size in pool.totals.values()]))
    widths = [max(10, len(phase) + 2) for phase in pool.phases]
    return [
        *(f"  {title:<28}" + "".join(map(str.rjust, cells, widths)) for title, cells in table),
        f"  {'largest phase':<28}{pool.largest[0]}",
    ]
