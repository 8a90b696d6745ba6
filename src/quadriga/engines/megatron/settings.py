"""Whether Megatron-core can be used here, and which settings its engine follows and refuses.

Importing this file imports neither torch nor Megatron-core, so that a run is checked before any
process starts.
"""

from __future__ import annotations

import math
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines.megatron.families import Sizes, check_sizes
from quadriga.errors import ConfigError
from quadriga.parallel.layouts import Degrees

PACKAGE = "megatron-core"
VERSION = "0.16.1"
"""The version that the engine was written for. Others have other modules and arguments."""

on_cpu_for_tests = False
"""Whether `tests/megatron_on_cpu.py` has let Megatron-core compute on CPUs."""


def check_engine(
    model: ModelConfig,
    engine: EngineConfig,
    optim: OptimConfig | None,
    device_type: str | None,
    key: str = "engine",
    model_key: str = "model",
) -> None:
    """Check that Megatron-core can be used, and that its engine follows all settings.

    Args:
        device_type: of the ranks. None: it is not known yet.
        key: of the engine's settings. Those of the optimizer are beside them.
        model_key: of the model's settings.

    Raises:
        ConfigError: Megatron-core is missing or does not compute on the device, or a setting is for
            the FSDP engine, or is not built for this one.
    """
    found = _version()
    if found != VERSION:
        state = "it is not installed" if found is None else f"this environment has {found}"
        raise ConfigError(
            f"{key}.name=megatron needs {PACKAGE} {VERSION}, and {state}; install "
            f"quadriga[megatron], or set {key}.name to fsdp",
            key=f"{key}.name",
        )
    if device_type not in (None, "cuda") and not (device_type == "cpu" and on_cpu_for_tests):
        raise ConfigError(
            f"{key}.name=megatron needs CUDA devices, and the device of the ranks is "
            f"{device_type!r}; set {key}.name=fsdp",
            key=f"{key}.name",
        )
    _check_followed(model, engine, optim, key, model_key)
    _check_degrees(sizes_of(engine), key)


def _version() -> str | None:
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


def sizes_of(engine: EngineConfig) -> Sizes:
    """Return the degrees of an engine's settings."""
    return Sizes(
        engine.tensor_parallel_size,
        engine.pipeline_parallel_size,
        engine.expert_parallel_size,
        engine.sequence_parallel,
        engine.virtual_pipeline_parallel_size,
        engine.expert_tensor_parallel_size,
        engine.context_parallel_size,
    )


def check_model(model: ModelConfig, engine: EngineConfig, key: str) -> None:
    """Check that the model of a folder is computed, and can be split by the degrees."""
    from quadriga.models.folder import local_folder
    from quadriga.models.loading import read_config  # imports torch

    folder = Path(local_folder(model.path, weights=False))
    config = read_config(folder, trust_remote_code=model.trust_remote_code)
    check_sizes(config.get_text_config(), sizes_of(engine), key)


def _check_followed(
    model: ModelConfig, engine: EngineConfig, optim: OptimConfig | None, key: str, model_key: str
) -> None:
    optim_key = key.removesuffix("engine") + "optim"
    attention = model.attn_implementation
    refused = {
        f"{model_key}.lora": model.lora.enabled,
        f"{model_key}.freeze": bool(model.freeze),
        f"{model_key}.use_shm": model.use_shm,
        f"{model_key}.trust_remote_code": model.trust_remote_code,
        f"{model_key}.gradient_checkpointing=selective": (
            model.gradient_checkpointing == "selective"
        ),
        f"{model_key}.attn_implementation={attention}": (
            attention != ModelConfig().attn_implementation
        ),
        f"{key}.dtype=float16": engine.dtype == "float16",
        f"{optim_key}.name={optim.name if optim else ''}": (
            optim is not None and optim.name != "adamw"
        ),
    }
    for setting, given in refused.items():
        if given:
            raise ConfigError(
                f"{setting} is not built for {key}.name=megatron; set {key}.name=fsdp, or leave it "
                "out",
                key=setting.split("=")[0],
            )


def _check_degrees(sizes: Sizes, key: str) -> None:
    """Check degrees that have no meaning without others."""
    if sizes.sequence_parallel and sizes.tensor == 1:
        raise ConfigError(
            f"{key}.sequence_parallel splits tokens over the tensor-parallel ranks, and "
            f"{key}.tensor_parallel_size is 1; set it above 1, or sequence_parallel to false",
            key=f"{key}.sequence_parallel",
        )
    if sizes.chunks > 1 and sizes.pipeline == 1:
        raise ConfigError(
            f"{key}.virtual_pipeline_parallel_size={sizes.chunks} divides the layers of a pipeline "
            f"stage, and {key}.pipeline_parallel_size is 1; set it above 1, or "
            "virtual_pipeline_parallel_size to 1",
            key=f"{key}.virtual_pipeline_parallel_size",
        )
    split = sizes.expert_tensor
    setting = f"{key}.expert_tensor_parallel_size"
    if split not in (None, 1, sizes.tensor):
        raise ConfigError(
            f"{setting}={split}, but the ranks that split an expert are 1 or the "
            f"{sizes.tensor} of {key}.tensor_parallel_size; set it to 1, {sizes.tensor} or null",
            key=setting,
        )
    if sizes.spread_experts and sizes.expert == 1:
        raise ConfigError(
            f"{setting}=1 gives {key}.tensor_parallel_size={sizes.tensor} ranks different experts, "
            f"and {key}.expert_parallel_size is 1; set it above 1, or {setting} to null",
            key=setting,
        )


def degrees_of(sizes: Sizes, ranks: int) -> Degrees:
    """Return the degrees of the weights. Context-parallel ranks have the same weights, so they are
    replicas as data-parallel ranks are.

    Raises:
        ConfigError: the ranks do not divide by the degrees.
    """
    # 8 ranks with tensor 2, pipeline 2, expert 2: 8 / (2 · 2) = 2 ranks with the same layers, which
    # have different experts, so there is 8 / (2 · 2 · 2) = 1 replica of each expert.
    of_expert = 1 if sizes.spread_experts else sizes.tensor
    _check_divides(ranks, tensor=sizes.tensor, pipeline=sizes.pipeline, context=sizes.context)
    _check_divides(ranks, tensor=of_expert, pipeline=sizes.pipeline, expert=sizes.expert)
    same_layers = ranks // sizes.tensor // sizes.pipeline
    if sizes.spread_experts:
        # 4 ranks with tensor 2, expert 4: two ranks with the same part of attention, two with the
        # other part, and each of the four has a quarter of the experts.
        return Degrees(
            tensor=sizes.tensor,
            replicas=same_layers,
            pipeline=sizes.pipeline,
            spread=sizes.expert,
        )
    return Degrees(
        tensor=sizes.tensor,
        expert=sizes.expert,
        replicas=same_layers // sizes.expert,
        pipeline=sizes.pipeline,
    )


def _check_divides(ranks: int, **sizes: int) -> None:
    """Check that the product of the degrees divides the ranks."""
    product = math.prod(sizes.values())
    if ranks % product:
        used = {name: size for name, size in sizes.items() if size > 1}
        names = " × ".join(f"{name}_parallel_size" for name in used)
        values = " × ".join(map(str, used.values()))
        of_product = f"{values} = {product}" if len(used) > 1 else values
        raise ConfigError(f"{names} = {of_product} does not divide the {ranks} ranks")
