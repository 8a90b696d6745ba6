"""Training engines: a model, its optimizer, and how both are sharded over the ranks of a group.

- this file: the table `ENGINES`, and the checks and the construction of the engine that the
  settings name.
- `base`: `TrainEngine`, which every engine extends, the types of outputs and losses, and what is
  moved to host memory.
- `fsdp`: the engine over FSDP2. It uses `loading` (from a folder to a sharded model and back; which
  part is trained), `sharding` (FSDP units), `tensor_parallel` (divided weights) and `optimizers`.
- `micro_batches`: which rows go together, and which of their tokens a rank computes.
- `token_model`: one forward pass, from rows of tokens to one number for each response token. It
  uses `attention` (packed rows).
- `megatron`: the engine over Megatron-core (docs/concepts/megatron.md).
- `sequence_cost`: what sequences of a model cost, from its config.
- `memory`: the device memory of an engine, known before it is built.

May import every package below `engines` in docs/architecture.md, but not `rollout`. Importing this
file imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from quadriga.config.convert import as_written
from quadriga.errors import ConfigError, unknown_name
from quadriga.lazy import imported

if TYPE_CHECKING:
    import torch

    from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
    from quadriga.engines.base import HeadKind, TrainEngine
    from quadriga.engines.memory import TrainingUse
    from quadriga.models.memory import EngineMemory


@dataclass(frozen=True)
class EngineKind:
    """A training engine. Each place is "module:name", which is imported when it is used.

    Attributes:
        engine: the `TrainEngine`.
        memory: see `engine_memory`.
        check_model: see `check_engine_folder`.
        check: see `check_engine`; "" if every setting is followed.
        reads: the settings of `EngineConfig` that no other engine reads.
        in_stages: the ranks that compute the same rows are those of all pipeline stages, not
            neighbours; all engines of a process have the same degrees.
        stores_checkpoint_weights: its tensors are those of the checkpoint, so that a rollout engine
            can use them in place.
        computes_full_kl: it can compute the KL over the vocabulary.
    """

    engine: str
    memory: str
    check_model: str
    check: str = ""
    reads: tuple[str, ...] = ()
    in_stages: bool = False
    stores_checkpoint_weights: bool = True
    computes_full_kl: bool = True


ENGINES = {
    "fsdp": EngineKind(
        "quadriga.engines.fsdp:FSDPEngine",
        "quadriga.engines.memory:fsdp_memory",
        "quadriga.engines.tensor_parallel:check_model",
        reads=(
            "reduce_dtype", "reshard_after_forward", "reduce_each_micro_batch", "offload_policy",
            "fsdp_size", "fused_head", "sequence_parallel_size",
        ),
    ),
    "megatron": EngineKind(
        "quadriga.engines.megatron.engine:MegatronEngine",
        "quadriga.engines.megatron.memory:megatron_memory",
        "quadriga.engines.megatron.families:check_model",
        "quadriga.engines.megatron.families:check_engine",
        reads=(
            "pipeline_parallel_size", "virtual_pipeline_parallel_size", "expert_parallel_size",
            "expert_tensor_parallel_size", "sequence_parallel", "distributed_optimizer",
        ),
        in_stages=True,
        stores_checkpoint_weights=False,
        computes_full_kl=False,
    ),
}  # fmt: skip


def kind_of(engine: EngineConfig) -> EngineKind:
    """Return the engine that the settings name; `UnknownNameError` if there is none."""
    if engine.name not in ENGINES:
        raise unknown_name("training engine", engine.name, ENGINES)
    return ENGINES[engine.name]


def check_engine(
    key: str,
    engine: EngineConfig,
    model: ModelConfig,
    *,
    device_type: str | None = None,
    model_key: str = "model",
) -> None:
    """Check, before a worker starts, that an engine is installed and follows its settings.

    Args:
        key: of the engine's settings.
        device_type: of the ranks. None: only the cluster knows.
        model_key: of the model's settings.

    Raises:
        ConfigError: names the setting.
    """
    kind = kind_of(engine)
    for other in ENGINES.keys() - {engine.name}:
        for name in ENGINES[other].reads:
            if (value := getattr(engine, name)) != getattr(type(engine), name):
                raise ConfigError(
                    f"{key}.{name}={as_written(value)} is read by {key}.name={other} only, but "
                    f"{key}.name={engine.name}; remove it",
                    key=f"{key}.{name}",
                )
    if kind.check:
        imported(kind.check)(model, engine, device_type, key, model_key)


def check_engine_folder(model: ModelConfig, engine: EngineConfig, key: str) -> None:
    """Check, before any process starts, that the ranks can divide the model of a folder.

    Raises:
        ConfigError: they cannot. The message has the arithmetic.
        ModelError: the engine does not compute the model.
    """
    imported(kind_of(engine).check_model)(model, engine, key)


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

    See `TrainEngine` for the arguments.

    Raises:
        UnknownNameError: there is no engine of that name.
        ConfigError: the engine is not installed, or settings are in conflict.
        ModelError: the folder does not hold a suitable model.
    """
    device_type = str(device).partition(":")[0]
    check_engine("engine", engine, model, device_type=device_type)
    built: TrainEngine = imported(kind_of(engine).engine)(
        model, engine, optim, head=head, device=device, total_steps=total_steps
    )
    return built


def engine_memory(model: ModelConfig, engine: EngineConfig, use: TrainingUse) -> EngineMemory:
    """Return the memory of the engine that `build_engine` builds, on the rank that needs most.

    Raises:
        ConfigError: the model or the ranks do not divide by the degrees of the engine.
        ModelError: the folder has no config of a model that the engine computes.
    """
    return cast("EngineMemory", imported(kind_of(engine).memory)(model, engine, use))
