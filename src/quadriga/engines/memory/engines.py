"""The memory of a training engine of either kind."""

from __future__ import annotations

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines.base import HeadKind
from quadriga.engines.memory.fsdp import fsdp_memory
from quadriga.engines.memory.megatron import megatron_memory
from quadriga.engines.memory.passes import Rows
from quadriga.engines.memory.states import TrainingMemory


def engine_memory(
    model: ModelConfig,
    engine: EngineConfig,
    *,
    head: HeadKind,
    ranks: int,
    device_type: str,
    update: Rows | None,
    evaluate: Rows | None,
    optim: OptimConfig | None = None,
) -> TrainingMemory:
    """Return the memory of the engine that `build_engine` builds; see `fsdp_memory`.

    Raises:
        ConfigError: the model or the ranks do not divide by the degrees of the engine.
        ModelError: the folder has no config of a model that the engine computes.
    """
    if engine.name == "megatron":
        return megatron_memory(
            model,
            engine,
            head=head,
            ranks=ranks,
            device_type=device_type,
            update=update,
            evaluate=evaluate,
        )
    return fsdp_memory(
        model,
        engine,
        head=head,
        ranks=ranks,
        device_type=device_type,
        update=update,
        evaluate=evaluate,
        optim=optim,
    )
