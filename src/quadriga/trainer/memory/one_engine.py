"""The refusal of a run that trains one engine, and what to change then.

`quadriga sft` and `quadriga rm` have the same sections for the engine, the model and the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from quadriga.config.schema import RMConfig, SFTConfig
from quadriga.engines.base import HeadKind
from quadriga.engines.memory.states import TrainingMemory
from quadriga.trainer.memory.host import HostedEngine, HostSettings
from quadriga.trainer.memory.machine import gib, planned_device
from quadriga.trainer.memory.phases import ACTOR, REWARD_MODEL
from quadriga.trainer.memory.plan import MemoryPlan
from quadriga.trainer.memory.remedies import Part, offers_8bit, smaller_runs
from quadriga.trainer.memory.report import check_plan, plan_lines

OneEngineConfig = SFTConfig | RMConfig

PlanFor = Callable[[str], MemoryPlan]
"""Returns the plan of a run on a type of device: "cpu", or the type of an accelerator."""


def check_one_engine(config: OneEngineConfig, plan_for: PlanFor) -> None:
    """Check that a run fits the memory of its ranks and of their hosts, if that is known.

    Raises:
        ConfigError: it does not fit. The message has the arithmetic, and says what to change.
    """
    device_type = planned_device(config.trainer)
    if not config.trainer.check_memory or device_type is None:
        return
    plan = plan_for(device_type)
    command = "plan sft" if isinstance(config, SFTConfig) else "plan rm"
    check_plan(plan, _host_settings(config), partial(_remedies, config, plan), command)


def one_engine_text(config: OneEngineConfig, plan_for: PlanFor) -> str:
    """Return the plan of a run as a table, and whether it fits."""
    plan = plan_for(planned_device(config.trainer) or "cuda")
    return "\n".join(plan_lines(plan, _host_settings(config), partial(_remedies, config, plan)))


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


def _remedies(config: OneEngineConfig, plan: MemoryPlan, part: Part) -> Iterator[str]:
    """Yield what to change, most effective first. `part`: that does not fit."""
    if part == "all":
        yield from _batch_remedies(config)
    fsdp, on_cpu = config.engine.name == "fsdp", plan.device_type == "cpu"
    if fsdp and not on_cpu and not config.engine.offload_policy:
        states = sum(engine.states for pool in plan.pools for engine in pool.engines.values())
        yield (
            "set engine.offload_policy=true (parameters, gradients and optimizer states in host "
            f"memory: {gib(states)} GiB of each rank at most)"
        )
    if not fsdp:
        yield "divide the model (engine.tensor_parallel_size, engine.pipeline_parallel_size)"
    elif offers_8bit(config.optim, config.engine, config.model, _ROLES[type(config)][1]):
        yield "set optim.name=adamw_8bit (a quarter of the optimizer states)"
    if not on_cpu:
        yield "shard over more ranks (trainer.n_gpus_per_node, trainer.nnodes)"
    else:
        yield smaller_runs(plan)


def _batch_remedies(config: OneEngineConfig) -> Iterator[str]:
    """Yield what makes activations smaller."""
    if not config.model.gradient_checkpointing:
        yield "set model.gradient_checkpointing=true"
    if config.data.micro_batch_size_per_gpu is None and config.engine.use_dynamic_bsz:
        budget = config.engine.max_tokens_per_micro_batch
        yield f"lower engine.max_tokens_per_micro_batch={budget}"
    else:
        yield "lower data.micro_batch_size_per_gpu"
