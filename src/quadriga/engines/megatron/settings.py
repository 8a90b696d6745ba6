"""The settings of a Megatron engine: those that it follows, and those that it refuses.

Needs neither torch nor Megatron-core, so that a run is checked before any process starts.
"""

from __future__ import annotations

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines.megatron.families import Sizes
from quadriga.errors import ConfigError

_OF_FSDP = (
    "reduce_dtype",
    "reshard_after_forward",
    "reduce_each_micro_batch",
    "param_offload",
    "optimizer_offload",
    "offload_policy",
    "fsdp_size",
    "fused_head",
    "sequence_parallel_size",
    "context_parallel_size",
)
"""Settings of the FSDP engine that mean nothing, or are not built, for Megatron-core."""


def sizes_of(engine: EngineConfig) -> Sizes:
    """Return the degrees of an engine's settings."""
    return Sizes(
        engine.tensor_parallel_size,
        engine.pipeline_parallel_size,
        engine.expert_parallel_size,
        engine.sequence_parallel,
    )


def check_settings(
    model: ModelConfig, engine: EngineConfig, optim: OptimConfig | None, key: str = "engine"
) -> None:
    """Check that the engine follows all settings.

    Args:
        key: of the engine's settings.

    Raises:
        ConfigError: a setting is for the FSDP engine, or is not built for this one.
    """
    default = EngineConfig()
    for name in _OF_FSDP:
        value = getattr(engine, name)
        if value != getattr(default, name):
            raise ConfigError(
                f"{key}.{name}={value} is for {key}.name=fsdp; leave it out for megatron",
                key=f"{key}.{name}",
            )
    refused = {
        "model.lora": model.lora.enabled,
        "model.freeze": bool(model.freeze),
        "model.use_shm": model.use_shm,
        "model.trust_remote_code": model.trust_remote_code,
        "model.gradient_checkpointing=selective": model.gradient_checkpointing == "selective",
        f"model.attn_implementation={model.attn_implementation}": (
            model.attn_implementation != ModelConfig().attn_implementation
        ),
        f"{key}.dtype=float16": engine.dtype == "float16",
        f"optim.name={optim.name if optim else ''}": optim is not None and optim.name != "adamw",
    }
    for setting, given in refused.items():
        if given:
            raise ConfigError(
                f"{setting} is not built for {key}.name=megatron; set {key}.name=fsdp, or leave it "
                "out",
                key=setting.split("=")[0],
            )
    sizes = sizes_of(engine)
    if sizes.sequence_parallel and sizes.tensor == 1:
        raise ConfigError(
            f"{key}.sequence_parallel splits tokens over the tensor-parallel ranks, and "
            f"{key}.tensor_parallel_size is 1; set it above 1, or sequence_parallel to false",
            key=f"{key}.sequence_parallel",
        )
