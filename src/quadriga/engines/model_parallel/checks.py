"""Which models can be split over how many ranks of a model-parallel group.

The checks read the config of a model, no weights, so that they can run before any process starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from quadriga.config.schema import EngineConfig, ModelConfig
from quadriga.engines.megatron.families import check_sizes
from quadriga.engines.megatron.settings import sizes_of
from quadriga.engines.model_parallel.tensor_plan import TensorPlan, check_division, check_heads
from quadriga.errors import ConfigError
from quadriga.models.architectures import architecture_of
from quadriga.models.folder import local_folder
from quadriga.models.loading import model_without_weights, read_config

_BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary positions that depend on the longest position of a pass."""


NOT_COMPARED = ("gemma3n_text",)
"""Architectures with packed rows whose gradients were not equal to those of one rank: in a small
model, some of them are not finite, and padding tokens change which."""


def check_model_parallel(
    config: PreTrainedConfig, engine: EngineConfig, key: str, *, packed: bool | None = None
) -> None:
    """Check that the ranks of a model-parallel group can divide the work of a model.

    Args:
        key: the setting of the engine, for the message.
        packed: whether rows are packed; None: if the model supports it.

    Raises:
        ConfigError: they cannot. The message has the arithmetic.
    """
    if engine.model_parallel_size == 1:
        return
    kind = config.model_type
    setting = f"{key}.{engine.model_parallel_text()}"
    if packed is False or architecture_of(config).rows != "packed":
        raise ConfigError(
            f"{setting} splits packed rows, and model_type {kind!r} is computed with padded rows "
            "(docs/concepts/architectures.md); set it to 1",
            key=key,
        )
    if kind in NOT_COMPARED:
        raise ConfigError(
            f"{setting}: gradients of model_type {kind!r} were not found equal to those of one "
            "rank; set it to 1",
            key=key,
        )
    lengths = [name for name in _rope_types(config) if name in _BY_LENGTH]
    if engine.sequence_parallel_size * engine.context_parallel_size > 1 and lengths:
        raise ConfigError(
            f"{setting} gives each rank a part of the positions, and rope_type {lengths[0]!r} of "
            f"model_type {kind!r} depends on the longest of all; set it to 1",
            key=key,
        )
    if engine.tensor_parallel_size > 1:
        TensorPlan.of(config)
        check_heads(config.get_text_config(), engine.tensor_parallel_size, key)
    _check_heads(config.get_text_config(), engine, key)


def _check_heads(config: PreTrainedConfig, engine: EngineConfig, key: str) -> None:
    size = engine.sequence_parallel_size
    if size == 1:
        return
    tensor = engine.tensor_parallel_size
    heads, key_heads = heads_of(config, tensor)
    whose = "attention heads" + (" of each tensor rank" if tensor > 1 else "")
    setting = f"{key}.sequence_parallel_size={size}"
    if heads % size:
        raise ConfigError(
            f"{setting} does not divide the {heads} {whose} of model_type "
            f"{config.model_type!r} ({heads} = {heads // size} × {size} + {heads % size}); "
            f"choose a divisor, or set {key}.context_parallel_size={size} instead",
            key=key,
        )
    repeated = key_heads * (size // math.gcd(key_heads, size))
    if heads % repeated:
        raise ConfigError(
            f"{setting}: {key_heads} key heads repeated to {repeated}, so that they divide over "
            f"{size} ranks, do not divide the {heads} {whose} of model_type "
            f"{config.model_type!r}; set {key}.context_parallel_size={size} instead",
            key=key,
        )


def heads_of(config: PreTrainedConfig, tensor_ranks: int) -> tuple[int, int]:
    """Return the attention heads and the key heads that one rank of tensor parallelism has."""
    heads = int(config.num_attention_heads)
    key_heads = getattr(config, "num_key_value_heads", None)
    return heads // tensor_ranks, int(key_heads or heads) // tensor_ranks


def _rope_types(config: PreTrainedConfig) -> Iterator[str]:
    """Yield the kinds of rotary positions; a config can have one for each kind of layers."""
    found = getattr(config.get_text_config(), "rope_parameters", None)
    pending = [found] if isinstance(found, Mapping) else []
    while pending:
        for name, value in pending.pop().items():
            if isinstance(value, Mapping):
                pending.append(value)
            elif name in ("rope_type", "type"):
                yield str(value)


def check_model_parallel_folder(model: ModelConfig, engine: EngineConfig, key: str) -> None:
    """Check the same for the model of a folder, before any process starts; see there.

    Raises:
        ConfigError: the ranks cannot divide the model.
        ModelError: the Megatron engine does not compute it.
    """
    if engine.name == "megatron" or engine.model_parallel_size > 1:
        folder = local_folder(model.path, weights=False)
        trusted = model.trust_remote_code
        config = read_config(Path(folder), trust_remote_code=trusted)
        if engine.name == "megatron":
            check_sizes(config.get_text_config(), sizes_of(engine), key)
            return
        check_model_parallel(config, engine, key)
        if engine.tensor_parallel_size > 1:
            implementation = model.attn_implementation
            shapes = model_without_weights(
                folder, value_head=False, dtype=torch.float32, trust_remote_code=trusted,
                attn_implementation=implementation,
            )  # fmt: skip
            check_division(shapes, engine.tensor_parallel_size, key)
