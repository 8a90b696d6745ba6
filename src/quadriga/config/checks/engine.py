"""Check how the settings of a training engine divide the ranks of its role."""

from __future__ import annotations

import math

from quadriga.config.checks.unread import check_unread_engine
from quadriga.config.schema import EngineConfig, OptimConfig
from quadriga.errors import ConfigError

_BY_ROWS = ("muon", "adamw_8bit")
"""Optimizers that need each rank to have whole rows of a weight."""


def check_engine_ranks(
    key: str, engine: EngineConfig, ranks: int, optim: OptimConfig | None = None
) -> None:
    """Check the sizes of an engine against the ranks of its role.

    Args:
        key: the setting of the engine.
        optim: its optimizer; None: the model is not trained.

    Raises:
        ConfigError: a size does not divide the ranks. The message has the arithmetic.
    """
    together, tensor = engine.model_parallel_size, engine.tensor_parallel_size
    if ranks % together:
        raise ConfigError(
            f"{key}.{engine.model_parallel_text()} ranks compute the same rows, which does not "
            f"divide the {ranks} ranks of the role ({ranks} = {ranks // together} × {together} + "
            f"{ranks % together}); choose sizes whose product divides {ranks}",
            key=key,
        )
    experts, stages = engine.expert_parallel_size, engine.pipeline_parallel_size
    whole_experts = engine.expert_tensor_parallel_size == 1
    divided = {} if whole_experts else {"tensor_parallel_size": tensor}
    divided |= {"pipeline_parallel_size": stages}
    same = ranks // math.prod(divided.values())
    if same % experts:
        names = " × ".join(f"{name} {size}" for name, size in divided.items())
        raise ConfigError(
            f"{key}.expert_parallel_size={experts} divides the experts of a layer over the ranks "
            f"that have this layer{'' if whole_experts else ' and equal parts of it'}, but does "
            f"not divide these: {ranks} ranks / ({names}) = {same}",
            key=f"{key}.expert_parallel_size",
        )
    if engine.attention == "flex" and engine.context_parallel_size > 1:
        raise ConfigError(
            f"{key}.attention=flex computes all queries of a row, and {key}.context_parallel_size="
            f"{engine.context_parallel_size} divides them over ranks; set attention to auto",
            key=f"{key}.attention",
        )
    size, left = engine.fsdp_size, ranks // tensor
    if size != -1 and (size < 1 or left % size):
        of = f"the {ranks} ranks" if tensor == 1 else f"{ranks} ranks / {tensor} = {left}"
        rest = f" ({left} = {left // size} × {size} + {left % size})" if size > 0 else ""
        raise ConfigError(
            f"{key}.fsdp_size={size} must be -1 (all ranks) or divide {of}{rest}",
            key=f"{key}.fsdp_size",
        )
    by_rows = engine.name == "fsdp" and tensor > 1
    if optim is not None and by_rows and optim.name in _BY_ROWS:
        raise ConfigError(
            f"optim.name={optim.name} needs whole rows of each weight on a rank, and "
            f"{key}.tensor_parallel_size={tensor} divides them; set optim.name=adamw, or "
            "tensor_parallel_size=1",
            key=f"{key}.tensor_parallel_size",
        )
    check_unread_engine(key, engine)
