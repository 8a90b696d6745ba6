"""Check the training engines of a run: their settings against each other and against the ranks.

role_engines         the engines that a run uses
check_role_engines   each is installed and follows its settings; engines of one process agree
check_engine_ranks   how the settings of an engine divide the ranks of its role
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quadriga.config.commands import RMConfig, SFTConfig
from quadriga.config.plan import batch_plan
from quadriga.config.role_ranks import (
    REWARD_MODEL,
    has_reward_model,
    reference_engine,
    role_pools,
)
from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from quadriga.engines import check_engine
from quadriga.errors import ConfigError
from quadriga.trainer.memory.machine import planned_device
from quadriga.trainer.roles.needed import critic_model, needs_critic, needs_reference, uses_of_run

if TYPE_CHECKING:
    from quadriga.engines.base import HeadKind

_BY_ROWS = ("muon", "adamw_8bit")
"""Optimizers that need each rank to have whole rows of a weight."""
_DEGREES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "expert_tensor_parallel_size",
)


@dataclass(frozen=True)
class RoleEngine:
    """The training engine of a role.

    Attributes:
        key, model_key: of the settings of the engine and of the model.
        optim: None if the model is frozen.
    """

    role: str
    key: str
    engine: EngineConfig
    model: ModelConfig
    optim: OptimConfig | None = None
    model_key: str = "actor_rollout_ref.model"
    head: HeadKind = "lm"


def role_engines(config: TrainConfig) -> Iterator[RoleEngine]:
    """Yield the training engines that the run uses."""
    policy, actor, critic = config.actor_rollout_ref, config.actor_rollout_ref.actor, config.critic
    yield RoleEngine(
        "actor", "actor_rollout_ref.actor.engine", actor.engine, policy.model, actor.optim
    )
    if needs_reference(config):
        yield RoleEngine("ref", *reference_engine(config), policy.model.frozen())
    if needs_critic(config):
        own = critic.model.path or critic.model.lora.enabled or critic.model.freeze
        named = "critic.model" if own else "actor_rollout_ref.model"
        model = critic_model(config)
        yield RoleEngine(
            "critic", "critic.engine", critic.engine, model, critic.optim, named, "value"
        )
    if has_reward_model(config):
        section, key = config.reward_model, REWARD_MODEL
        yield RoleEngine(
            key, f"{key}.engine", section.engine, section.model, None, f"{key}.model", "score"
        )


def check_role_engines(config: TrainConfig) -> None:
    """Check the training engines of `quadriga train`.

    Raises:
        ConfigError: names the setting.
    """
    device_type = planned_device(config.trainer)
    engines = {found.role: found for found in role_engines(config)}
    for found in engines.values():
        check_engine(
            found.key, found.engine, found.model, found.optim,
            device_type=device_type, model_key=found.model_key,
        )  # fmt: skip
    for pool in role_pools(config, uses_of_run(config)):
        _check_same_degrees({role: e for role, e in engines.items() if role in pool.roles})
    plan = batch_plan(config)
    for update, section in ((plan.actor, config.actor_rollout_ref.actor),
                            (plan.critic, config.critic)):  # fmt: skip
        if update.role in engines:
            check_stages(
                engines[update.role].key,
                section.engine,
                update.mini_batch_per_rank,
                section.ppo_micro_batch_size_per_gpu,
            )


def check_fine_tuning_engine(config: SFTConfig | RMConfig) -> None:
    """Check the training engine of `quadriga sft` or `quadriga rm`.

    Raises:
        ConfigError: names the setting.
    """
    trainer, engine = config.trainer, config.engine
    check_engine("engine", engine, config.model, config.optim, device_type=planned_device(trainer))
    ranks = trainer.nnodes * trainer.n_gpus_per_node // engine.model_parallel_size
    of_pair = 2 if isinstance(config, RMConfig) else 1
    rows = of_pair * config.data.train_batch_size // ranks
    check_stages("engine", engine, rows, config.data.micro_batch_size_per_gpu)


def head_of(config: SFTConfig | RMConfig) -> HeadKind:
    """Return the head of the model that a command trains."""
    return "score" if isinstance(config, RMConfig) else "lm"


def check_head(key: str, engine: EngineConfig, head: HeadKind) -> None:
    """Check that `fused_head`, which computes log-probabilities, is not set for another head."""
    if engine.fused_head and head != "lm":
        raise ConfigError(
            f"{key}.fused_head=true is for log-probabilities, and this model computes one number "
            f"a {'token' if head == 'value' else 'sequence'}; set it to null",
            key=f"{key}.fused_head",
        )


def check_engine_ranks(
    key: str, engine: EngineConfig, ranks: int, optim: OptimConfig | None = None
) -> None:
    """Check the sizes of an engine against the ranks of its role.

    Args:
        key: of the engine's settings.
        optim: None if the model is not trained.

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
    split = 1 if engine.expert_tensor_parallel_size == 1 else tensor
    same = ranks // (split * engine.pipeline_parallel_size)
    if same % engine.expert_parallel_size:
        raise ConfigError(
            f"{key}.expert_parallel_size={engine.expert_parallel_size} divides the experts of a "
            f"layer over the ranks that have equal parts of it, but does not divide these: {ranks} "
            f"ranks / ({split} that split an expert × {engine.pipeline_parallel_size} pipeline "
            f"stages) = {same}",
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
    if optim is not None and optim.name in _BY_ROWS and engine.name == "fsdp" and tensor > 1:
        raise ConfigError(
            f"optim.name={optim.name} needs whole rows of each weight on a rank, and "
            f"{key}.tensor_parallel_size={tensor} divides them; set optim.name=adamw, or "
            "tensor_parallel_size=1",
            key=f"{key}.tensor_parallel_size",
        )


def _size(engine: EngineConfig, name: str) -> int:
    """Return a degree, with the default of `expert_tensor_parallel_size` put in."""
    size: int | None = getattr(engine, name)
    return engine.tensor_parallel_size if size is None else size


def check_device(trainer: RunConfig) -> None:
    """Check that this process can see the device on which the local backend computes.

    Raises:
        ConfigError: it cannot. On Ray the ranks may be on nodes with other devices.
    """
    from quadriga.parallel.device import get_device_name  # imports torch

    seen = get_device_name()
    if trainer.backend == "local" and trainer.device not in ("auto", "cpu", seen):
        raise ConfigError(
            f"trainer.device={trainer.device} needs such a device in this process, and the best "
            f"that it can see is {seen}; set trainer.device={seen} or auto, or make the device "
            "visible",
            key="trainer.device",
        )


def check_stages(key: str, engine: EngineConfig, rows: int, micro_batch: int | None) -> None:
    """Check that a mini-batch has a micro-batch for each stage of a pipeline.

    With m micro-batches, p stages and v chunks of the layers of a stage, a stage waits for (p − 1)
    / (v · m + p − 1) of a step (the bubble of arXiv 2104.04473, §2.2).

    Args:
        rows: of a mini-batch, on each data-parallel rank.
        micro_batch: rows of a micro-batch. None: as the engine cuts them.

    Raises:
        ConfigError: it has fewer; or an interleaved schedule cannot compute their number.
    """
    stages, chunks = engine.pipeline_parallel_size, engine.virtual_pipeline_parallel_size
    if stages == 1:
        return
    if micro_batch is None:
        # Cut by tokens, the rows make at least `stages` micro-batches if there are as many rows.
        count, how = (rows, "rows") if engine.use_dynamic_bsz else (1, "use_dynamic_bsz=false")
    else:
        count = math.ceil(rows / micro_batch)
        how = f"{rows} rows in micro-batches of {micro_batch}"
    if count < stages:
        idle = (stages - 1) / (chunks * count + stages - 1)
        raise ConfigError(
            f"{key}.pipeline_parallel_size={stages} stages need at least {stages} micro-batches, "
            f"but a mini-batch makes {count} on each data-parallel rank ({how}): each stage would "
            f"wait for ({stages} - 1) / ({chunks * count} + {stages} - 1) = {idle:.0%} of a "
            "step; use smaller micro-batches, larger mini-batches or fewer stages",
            key=f"{key}.pipeline_parallel_size",
        )
    if chunks > 1 and micro_batch is not None and count % stages:
        raise ConfigError(
            f"{key}.virtual_pipeline_parallel_size={chunks} computes micro-batches in rounds of "
            f"{key}.pipeline_parallel_size={stages}, but a mini-batch makes {count} on each "
            f"data-parallel rank ({how}), and {count} % {stages} = {count % stages}; set another "
            "size of micro-batches, or virtual_pipeline_parallel_size to 1",
            key=f"{key}.virtual_pipeline_parallel_size",
        )


def _check_same_degrees(engines: Mapping[str, RoleEngine]) -> None:
    """Check that the Megatron engines of one process have the same degrees.

    Megatron-core keeps the groups of its ranks in one state of the process.
    """
    megatron = [found for found in engines.values() if found.engine.name == "megatron"]
    for other in megatron[1:]:
        for name in _DEGREES:
            first = megatron[0]
            sizes = _size(first.engine, name), _size(other.engine, name)
            if sizes[0] != sizes[1]:
                raise ConfigError(
                    f"{first.key}.{name}={sizes[0]} and {other.key}.{name}={sizes[1]}, but "
                    "Megatron engines of one process have the same ranks; set both equal, or give "
                    f"the {other.role} ranks of its own (placement.{other.role})",
                    key=f"{other.key}.{name}",
                )
