"""The refusal of a run that trains one engine, and what to change then.

`quadriga sft` and `quadriga rm` have the same sections for the engine, the model and the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quadriga.config.schema import RMConfig, SFTConfig
from quadriga.engines.memory.states import TrainingMemory
from quadriga.errors import ConfigError
from quadriga.trainer.memory.machine import device_limit, planned_device
from quadriga.trainer.memory.plan import MemoryPlan
from quadriga.trainer.memory.report import shortage, table_text

OneEngineConfig = SFTConfig | RMConfig

PlanFor = Callable[[str], MemoryPlan]
"""Returns the plan of a run on a type of device: "cpu", or the type of an accelerator."""


def check_one_engine(config: OneEngineConfig, plan_for: PlanFor) -> None:
    """Check that a run fits the memory of its ranks, if that is known.

    Raises:
        ConfigError: it does not fit. The message has the arithmetic, and says what to change.
    """
    device_type = planned_device(config.trainer)
    checked = config.trainer.check_memory
    limit = device_limit(config.trainer, device_type) if checked and device_type else None
    if limit is None or device_type is None:
        return
    plan = plan_for(device_type)
    short = shortage(plan, limit, states_only=True) or shortage(plan, limit)
    if short is not None:
        raise ConfigError(
            f"{short}; {'; or '.join(_remedies(config, device_type))}; "
            "trainer.check_memory=false starts the run anyway",
            key="trainer.check_memory",
        )


def one_engine_text(config: OneEngineConfig, plan_for: PlanFor) -> str:
    """Return the plan of a run as a table, and whether it fits."""
    device_type = planned_device(config.trainer) or "cuda"
    limit = device_limit(config.trainer, device_type)
    return table_text(plan_for(device_type), limit, lambda: _remedies(config, device_type))


def missing_activations(role: str, engine: TrainingMemory) -> tuple[str, ...]:
    """Return what the plan does not count of the engine of `role`, in words."""
    return (f"activations of the {role} ({engine.uncounted})",) if engine.uncounted else ()


def _remedies(config: OneEngineConfig, device_type: str) -> Iterator[str]:
    """Yield what to change, most effective first."""
    if not config.model.gradient_checkpointing:
        yield "set model.gradient_checkpointing=true"
    if config.data.micro_batch_size_per_gpu is None and config.engine.use_dynamic_bsz:
        budget = config.engine.max_tokens_per_micro_batch
        yield f"lower engine.max_tokens_per_micro_batch={budget}"
    else:
        yield "lower data.micro_batch_size_per_gpu"
    fsdp = config.engine.name == "fsdp"
    if fsdp and device_type != "cpu" and not config.engine.offload_policy:
        yield "set engine.offload_policy=true"
    if not fsdp:
        yield "divide the model (engine.tensor_parallel_size, engine.pipeline_parallel_size)"
    elif config.optim.name == "adamw":
        yield "set optim.name=adamw_8bit (a quarter of the optimizer states)"
    if device_type != "cpu":
        yield "shard over more ranks (trainer.n_gpus_per_node, trainer.nnodes)"
    else:
        yield "use fewer ranks of a node, or a smaller model"
