"""The refusal of a run that trains one engine, and what to change then.

`quadriga sft` and `quadriga rm` have the same sections for the engine, the model and the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from quadriga.config.commands import RMConfig, SFTConfig
from quadriga.config.schema import EngineConfig
from quadriga.engines.base import HeadKind
from quadriga.engines.memory.passes import passes_counted_once
from quadriga.engines.memory.states import TrainingMemory
from quadriga.errors import ModelError
from quadriga.trainer.memory.host import HostedEngine, HostSettings
from quadriga.trainer.memory.machine import gib, planned_device
from quadriga.trainer.memory.phases import ACTOR, REWARD_MODEL, Part
from quadriga.trainer.memory.plan import MemoryPlan
from quadriga.trainer.memory.remedies import (
    forms_beside,
    offers_8bit,
    saved_activations,
    smaller_runs,
)
from quadriga.trainer.memory.report import check_plan, plan_lines

OneEngineConfig = SFTConfig | RMConfig

PlanFor = Callable[[Any, str], MemoryPlan]
"""Returns the plan of a run with settings of its class on a type of device: "cpu", or the type of
an accelerator."""


@passes_counted_once()
def check_one_engine(config: OneEngineConfig, plan_for: PlanFor) -> None:
    """Check that a run fits the memory of its ranks and of their hosts, if that is known.

    Raises:
        ConfigError: it does not fit. The message has the arithmetic, and says what to change.
    """
    device_type = planned_device(config.trainer)
    if not config.trainer.check_memory or device_type is None:
        return
    plan = plan_for(config, device_type)
    command = "plan sft" if isinstance(config, SFTConfig) else "plan rm"
    check_plan(plan, _host_settings(config), partial(_remedies, config, plan, plan_for), command)


@passes_counted_once()
def one_engine_text(config: OneEngineConfig, plan_for: PlanFor) -> str:
    """Return the plan of a run as a table, and whether it fits."""
    plan = plan_for(config, planned_device(config.trainer) or "cuda")
    advice = partial(_remedies, config, plan, plan_for)
    return "\n".join(plan_lines(plan, _host_settings(config), advice))


def _host_settings(config: OneEngineConfig) -> HostSettings:
    role, head = _ROLES[type(config)]
    own = HostedEngine("engine", config.engine, config.model, head, trained=True)
    return HostSettings(config.trainer, {role: own})


_ROLES: dict[type[OneEngineConfig], tuple[str, HeadKind]] = {
    SFTConfig: (ACTOR, "lm"),
    RMConfig: (REWARD_MODEL, "score"),
}


def missing_activations(role: str, engine: TrainingMemory) -> tuple[str, ...]:
    """Return what the plan does not count of the engine of `role`, in words."""
    return (f"activations of the {role} ({engine.uncounted})",) if engine.uncounted else ()


def _remedies(
    config: OneEngineConfig, plan: MemoryPlan, plan_for: PlanFor, part: Part
) -> Iterator[str]:
    """Yield what to change, most effective first.

    A setting with a value is only named if the number that does not fit falls with it.
    """
    own, on_cpu = plan.pools[0].bytes_of(part), plan.device_type == "cpu"

    def less(**sections: Any) -> MemoryPlan | None:
        try:
            other = plan_for(replace(config, **sections), plan.device_type)
        except ModelError:  # no layers to checkpoint
            return None
        return other if other.pools[0].bytes_of(part) < own else None

    if part == "all":
        yield from _batch_remedies(config, plan, less)
    fsdp, engine = config.engine.name == "fsdp", config.engine
    hosted = replace(engine, offload_policy=True)
    if fsdp and not on_cpu and not engine.offloads and less(engine=hosted):
        states = sum(e.states for pool in plan.pools for e in pool.engines.values())
        yield (
            "set engine.offload_policy=true (parameters, gradients and optimizer states in host "
            f"memory: {gib(states)} GiB of each rank at most)"
        )
    eight, (_, head) = replace(config.optim, name="adamw_8bit"), _ROLES[type(config)]
    if not fsdp and len(plan.pools[0].pool.ranks) > engine.model_parallel_size:
        yield "divide the model (engine.tensor_parallel_size, engine.pipeline_parallel_size)"
    if fsdp and offers_8bit(config.optim, engine, config.model, head) and less(optim=eight):
        yield "set optim.name=adamw_8bit (a quarter of the optimizer states)"
    if not on_cpu:
        yield "shard over more ranks (trainer.n_gpus_per_node, trainer.nnodes)"
    else:
        yield smaller_runs(plan)


def _batch_remedies(
    config: OneEngineConfig, plan: MemoryPlan, less: Callable[..., MemoryPlan | None]
) -> Iterator[str]:
    """Yield what makes activations smaller. `less`: as in `_remedies`."""
    role, _ = _ROLES[type(config)]
    model, data = config.model, config.data
    for word, form in forms_beside(model.gradient_checkpointing, [config.engine.name]).items():
        other = less(model=replace(model, gradient_checkpointing=form))
        if other is not None:
            saved = saved_activations(role, plan.pools[0].engines[role], other)
            yield f"set model.gradient_checkpointing={word} ({saved})"
    engine, rows = config.engine, data.micro_batch_size_per_gpu
    if engine.use_dynamic_bsz:
        one = replace(engine, max_tokens_per_micro_batch=_row_tokens(plan, engine))
        if less(engine=one):
            yield f"lower engine.max_tokens_per_micro_batch={engine.max_tokens_per_micro_batch}"
    limited = rows is not None or not engine.use_dynamic_bsz
    if limited and less(data=replace(data, micro_batch_size_per_gpu=1)):
        yield "lower data.micro_batch_size_per_gpu" + ("" if rows is None else f"={rows}")


def _row_tokens(plan: MemoryPlan, engine: EngineConfig) -> int:
    """Return the tokens of a row on each of the ranks that split it."""
    (memory,) = plan.pools[0].engines.values()
    assert memory.update is not None
    return max(1, memory.update.tokens // memory.update.rows // engine.model_parallel_size)
