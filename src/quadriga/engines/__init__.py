"""Training engines: a model, its optimizer, and how both are sharded over the ranks of a group.

- `base`: the `TrainEngine` protocol, the types of batches, outputs and losses.
- `fsdp`: the engine over FSDP2. It uses `loading` (from a folder to a sharded model), `sharding`
  (FSDP units), `trained_part` (adapters, frozen weights), `tensor_parallel` (divided weights),
  `micro_batches` (which rows go together), `optimizers` and `offload` (device memory to host
  memory and back).
- `token_model`: one forward pass, from rows of tokens to one number for each response token. It
  uses `attention` (packed rows) and `token_slice` (the tokens of one rank).
- `megatron`: the engine over Megatron-core (docs/concepts/megatron.md).
- `sequence_cost`: what sequences of a model cost, from its config.
- `memory`: the device memory of an engine, known before it is built; `fsdp_memory`: of `fsdp`.

May import every package below `engines` in docs/architecture.md, but not `rollout`. Importing this
file imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from quadriga.config.describe import as_written
from quadriga.errors import ConfigError, UnknownNameError, nearest_name

if TYPE_CHECKING:
    import torch

    from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
    from quadriga.engines.base import HeadKind, TrainEngine
    from quadriga.engines.memory import TrainingUse
    from quadriga.models.memory import EngineMemory


class EngineFactory(Protocol):
    """Builds one kind of training engine. See `build_engine` for the arguments."""

    def __call__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        optim: OptimConfig | None,
        *,
        head: HeadKind,
        device: str | torch.device,
        total_steps: int | None,
    ) -> TrainEngine: ...


def _fsdp(
    model: ModelConfig,
    engine: EngineConfig,
    optim: OptimConfig | None,
    *,
    head: HeadKind,
    device: str | torch.device,
    total_steps: int | None,
) -> TrainEngine:
    from quadriga.engines.fsdp import FSDPEngine

    return FSDPEngine(model, engine, optim, head=head, device=device, total_steps=total_steps)


def _megatron(
    model: ModelConfig,
    engine: EngineConfig,
    optim: OptimConfig | None,
    *,
    head: HeadKind,
    device: str | torch.device,
    total_steps: int | None,
) -> TrainEngine:
    from quadriga.engines.megatron.settings import check_installed

    check_installed()
    from quadriga.engines.megatron.engine import MegatronEngine

    return MegatronEngine(model, engine, optim, head=head, device=device, total_steps=total_steps)


ENGINES: dict[str, EngineFactory] = {"fsdp": _fsdp, "megatron": _megatron}
"""Name -> function that builds the engine."""

READ_BY = {
    "fsdp": (
        "reduce_dtype",
        "reshard_after_forward",
        "reduce_each_micro_batch",
        "offload_policy",
        "fsdp_size",
        "fused_head",
        "sequence_parallel_size",
    ),
    "megatron": (
        "pipeline_parallel_size",
        "virtual_pipeline_parallel_size",
        "expert_parallel_size",
        "expert_tensor_parallel_size",
        "sequence_parallel",
        "distributed_optimizer",
    ),
}
"""Name of an engine -> the settings of `EngineConfig` that no other engine reads."""


def without_adapters(engine: TrainEngine) -> TrainEngine:
    """Return the base model of an engine that trains adapters: a frozen engine on its weights.

    Raises:
        ConfigError: the engine has no adapters.
    """
    from quadriga.engines.fsdp import FSDPEngine

    if not isinstance(engine, FSDPEngine):
        raise ConfigError(
            f"{type(engine).__name__} has no adapters; set engine.name=fsdp, or remove model.lora"
        )
    return engine.without_adapters()


def check_engine(
    key: str,
    engine: EngineConfig,
    model: ModelConfig,
    optim: OptimConfig | None = None,
    *,
    device_type: str | None = None,
    model_key: str = "model",
) -> None:
    """Check, before a worker starts, that an engine is installed and follows its settings.

    Args:
        key: of the engine's settings.
        optim: None for a frozen model. Its settings are beside those of the engine.
        device_type: of the ranks. None: only the cluster knows.
        model_key: of the model's settings.

    Raises:
        ConfigError: names the setting.
    """
    _check_read(key, engine)
    if engine.name == "megatron":
        from quadriga.engines.megatron.settings import check_device, check_installed, check_settings

        check_installed(f"{key}.name")
        if device_type is not None:
            check_device(device_type, f"{key}.name")
        check_settings(model, engine, optim, key, model_key)


def _check_read(key: str, engine: EngineConfig) -> None:
    """Raise `ConfigError` for a setting that only another engine reads."""
    for other in READ_BY.keys() - {engine.name}:
        for name in READ_BY[other]:
            if (value := getattr(engine, name)) != getattr(type(engine), name):
                raise ConfigError(
                    f"{key}.{name}={as_written(value)} is read by {key}.name={other} only, but "
                    f"{key}.name={engine.name}; remove it",
                    key=f"{key}.{name}",
                )


def build_engine(
    model: ModelConfig,
    engine: EngineConfig,
    optim: OptimConfig | None = None,
    *,
    head: HeadKind = "lm",
    device: str | torch.device = "cpu",
    total_steps: int | None = None,
) -> TrainEngine:
    """Build the training engine that `engine.name` names. Every rank of the group calls this.

    Args:
        optim: None for a frozen model, for example the reference policy.
        head: "lm" for log-probabilities, "value" for one value a token, "score" for a reward
            model.
        device: the device of this rank, or its type ("cuda").
        total_steps: optimizer steps of the run, which the schedule needs if `optim.total_steps` is
            not set.

    Raises:
        UnknownNameError: there is no engine of that name.
        ConfigError: the engine is not in this release, or settings are in conflict.
        ModelError: the folder does not hold a suitable model.
    """
    if engine.name not in ENGINES:
        nearest = nearest_name(engine.name, ENGINES)
        hint = f"; did you mean {nearest!r}?" if nearest else ""
        raise UnknownNameError(
            f"there is no training engine {engine.name!r}; known: {', '.join(ENGINES)}{hint}",
            name=engine.name,
            known=list(ENGINES),
            nearest=nearest,
        )
    _check_read("engine", engine)
    factory = ENGINES[engine.name]
    return factory(model, engine, optim, head=head, device=device, total_steps=total_steps)


def engine_memory(model: ModelConfig, engine: EngineConfig, use: TrainingUse) -> EngineMemory:
    """Return the memory of the engine that `build_engine` builds, on the rank that needs most.

    Raises:
        ConfigError: the model or the ranks do not divide by the degrees of the engine.
        ModelError: the folder has no config of a model that the engine computes.
    """
    if engine.name == "megatron":
        from quadriga.engines.megatron.memory import megatron_memory

        return megatron_memory(model, engine, use)
    from quadriga.engines.memory import fsdp_memory

    return fsdp_memory(model, engine, use)
