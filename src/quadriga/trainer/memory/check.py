"""The memory plan of a command as a table, and the refusal of a run that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from quadriga.config.commands import GenerationConfig, RMConfig, SFTConfig
from quadriga.config.role_ranks import (
    trainer_settings,
)
from quadriga.config.schema import RunConfig, TrainConfig
from quadriga.data.pairs import PairLengths
from quadriga.errors import ConfigError, ModelError
from quadriga.parallel.device import planned_device, ranks_are_elsewhere
from quadriga.trainer.memory.machine import available_memory, device_limit

if TYPE_CHECKING:
    from quadriga.data import PromptDataset
    from quadriga.data.conversations import ConversationLengths
from quadriga.trainer.memory.plan import (
    CRITIC,
    REWARD_MODEL,
    MemoryPlan,
    PoolMemory,
    generation_plan,
    gib,
    rm_plan,
    sft_plan,
    train_plan,
)

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True)
class Memory(Generic[ConfigT]):
    """The memory of the run of a command.

    Attributes:
        plan_of: returns the plan of a run with some settings on a type of device: "cpu", or the
            type of an accelerator.
        command: the words after `quadriga` that show the plan.
        sections: of the settings in which a remedy is looked for.
    """

    config: ConfigT
    trainer: RunConfig
    plan_of: Callable[[ConfigT, str], MemoryPlan]
    command: str
    sections: tuple[str, ...]

    def check(self) -> None:
        """Check that the run fits the memory of its ranks and their hosts, where that is known.

        Raises:
            ConfigError: it does not fit. The message has the arithmetic, and says what to change.
        """
        device_type = planned_device(self.trainer)
        if not self.trainer.check_memory or device_type is None:
            return
        plan = self.plan_of(self.config, device_type)
        short = self._shortage(plan)
        if short is not None:
            raise ConfigError(
                f"{short}; {'; or '.join(self.remedies(plan))}; `quadriga {self.command}` shows "
                "all parts, and trainer.check_memory=false starts the run anyway",
                key="trainer.check_memory",
            )

    def text(self) -> str:
        """Return the plan as a table, and whether it fits.

        Raises:
            ModelError: the model folder has no config of a suitable model.
        """
        plan = self.plan_of(self.config, planned_device(self.trainer) or "cuda")
        limit = device_limit(self.trainer, plan.device_type)
        lines = [f"memory of one rank in GiB, device {plan.device_type}"]
        for pool in plan.pools:
            lines += table_lines(pool)
        if plan.missing:
            lines.append(f"  not counted: {'; '.join(plan.missing)}")
        if plan.device_type != "cpu":
            lines.append(f"  host memory of a node: {gib(plan.host)} GiB")
        if limit is None:
            return "\n".join(
                [*lines, "  memory of the device: unknown; set trainer.device_memory_gb"]
            )
        lines.append(f"  {gib(limit.size)} GiB: {limit.source}")
        short = self._shortage(plan)
        if short is not None:
            lines += [f"  {short}", *(f"    {text}" for text in self.remedies(plan))]
        elif plan.missing:
            left = gib(limit.size - plan.needed)
            lines.append(f"  what is counted fits; {left} GiB are left for what is not")
        else:
            lines.append("  the run fits")
        return "\n".join(lines)

    def _shortage(self, plan: MemoryPlan) -> str | None:
        """Return why a plan does not fit, as a sentence without its end. None: it fits."""
        limit = device_limit(self.trainer, plan.device_type)
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
        if plan.device_type == "cpu" or ranks_are_elsewhere(self.trainer):
            return None
        host = available_memory()
        if plan.host <= host:
            return None
        needed, given = _apart(plan.host, host)
        return (
            f"the ranks of a node need {needed} GiB of host memory for processes, offloaded states "
            f"and models while they are loaded, but {given} GiB are available on this machine"
        )

    def remedies(self, plan: MemoryPlan) -> list[str]:
        """Return at most three changes, most effective first. All of them lower what is needed."""
        limit = device_limit(self.trainer, plan.device_type)
        if limit is not None and plan.needed <= limit.size:
            return ["keep states on the devices, use fewer ranks of a node "
                    "(trainer.n_gpus_per_node), or hosts with more memory"]  # fmt: skip
        found = []
        for key, now, trial in self._candidates(plan):
            try:
                other = self.plan_of(_changed(self.config, key, trial), plan.device_type)
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
        for section in self.sections:
            for name, trial in _TRIALS.items():
                key = f"{section}.{name}".lstrip(".")
                now = _value(self.config, key)
                if now is _ABSENT or now == trial or (name == "optim.name" and now != "adamw"):
                    continue
                if name == "engine.tensor_parallel_size":
                    trial, engine = 2 * now, _value(self.config, f"{section}.engine".lstrip("."))
                    ranks = self.trainer.nnodes * self.trainer.n_gpus_per_node
                    if engine.name != "megatron" or ranks % (2 * engine.model_parallel_size):
                        continue
                if name == "max_response_length":
                    trial = max(1, now // 2)
                yield key, now, trial
        for pool in plan.pools:
            if pool.generation is not None and pool.generation.limit is not None:
                name, value = pool.generation.limit
                section = next(s for s in self.sections if s.endswith("rollout"))
                yield f"{section}.{name}", value, type(value)(value / 2)


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


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = (
            config.get(name, _ABSENT)
            if isinstance(config, Mapping)
            else getattr(config, name, _ABSENT)
        )
    return config


def _changed(config: Any, key: str, value: object) -> Any:
    """Return the same settings with another value at a dotted key."""
    name, _, rest = key.partition(".")
    inner = {} if isinstance(config, Mapping) else getattr(config, name)
    if isinstance(config, Mapping):
        inner = config.get(name, {})
        return {**config, name: _changed(inner, rest, value) if rest else value}
    return replace(config, **{name: _changed(inner, rest, value) if rest else value})


def _apart(needed: int, limit: int) -> tuple[str, str]:
    """Return two sizes with as many digits as show which one is larger: "80.04" and "80"."""
    digits = next((n for n in range(3, 17) if gib(needed, n) != gib(limit, n)), 17)
    return gib(needed, digits), gib(limit, digits)


def table_lines(pool: PoolMemory) -> list[str]:
    """Return the table of a pool: a row for what is held, a column for each phase."""
    names = list(pool.phases)
    whats = list(dict.fromkeys(what for held in pool.phases.values() for what in held))
    largest, _ = pool.largest
    widths = [max(10, len(name) + 2) for name in names]

    def line(title: str, cells: list[str]) -> str:
        return f"  {title:<28}" + "".join(
            f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)
        )

    lines = [line(", ".join(pool.pool.roles), names)]
    for what in whats:
        sizes = [held.get(what, 0) for held in pool.phases.values()]
        if any(sizes):
            lines.append(line(what, [gib(size) if size else "" for size in sizes]))
    lines.append(line("all", [gib(size) for size in pool.totals.values()]))
    return [*lines, f"  {'largest phase':<28}{largest}"]


def train_memory(config: TrainConfig) -> Memory[TrainConfig]:
    """Return the memory of a run of `quadriga train`."""
    policy = "actor_rollout_ref"
    sections = (
        policy,
        f"{policy}.actor",
        f"{policy}.ref",
        f"{policy}.rollout",
        CRITIC,
        REWARD_MODEL,
    )
    return Memory(config, config.trainer, train_plan, "plan", sections)


def sft_memory(
    config: SFTConfig,
    train: ConversationLengths,
    prompts: PromptDataset | None,
    evaluated: ConversationLengths | None,
) -> Memory[SFTConfig]:
    """Return the memory of a run of `quadriga sft`; for the arguments see `sft_plan`."""

    def plan(other: SFTConfig, device_type: str) -> MemoryPlan:
        return sft_plan(other, device_type, train, prompts, evaluated)

    return Memory(config, config.trainer, plan, "plan sft", ("", "data"))


def rm_memory(config: RMConfig, lengths: PairLengths) -> Memory[RMConfig]:
    """Return the memory of a run of `quadriga rm`."""
    return Memory(
        config,
        config.trainer,
        lambda other, device_type: rm_plan(other, device_type, lengths),
        "plan rm",
        ("", "data"),
    )


def generating_memory(
    config: GenerationConfig, prompts: PromptDataset | None = None
) -> Memory[GenerationConfig]:
    """Return the memory of a generation; for the arguments see `generation_plan`."""
    return Memory(
        config,
        trainer_settings(config.trainer),
        lambda other, device_type: generation_plan(other, device_type, prompts),
        "plan generate",
        ("", "rollout"),
    )
