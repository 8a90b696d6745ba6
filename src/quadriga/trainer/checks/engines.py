"""Checks of the training engines of a run: installed, with settings that each of them follows, and
with enough micro-batches for the stages of a pipeline."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

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

ACTOR = "actor_rollout_ref.actor"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoleEngine:
    """The training engine of a role. `key`, `model_key`: of its settings and of its model's;
    `optim`: None if it is frozen."""

    role: str
    key: str
    engine: EngineConfig
    model: ModelConfig
    optim: OptimConfig | None = None
    model_key: str = "actor_rollout_ref.model"


def role_engines(config: TrainConfig) -> Iterator[RoleEngine]:
    """Yield the training engines that the run uses."""
    policy, critic = config.actor_rollout_ref, config.critic
    yield RoleEngine(
        "actor", f"{ACTOR}.engine", policy.actor.engine, policy.model, policy.actor.optim
    )
    if needs_reference(config):
        frozen = policy.model.frozen()
        yield RoleEngine("ref", *reference_engine(config), frozen)
    if needs_critic(config):
        model = critic_model(config)
        own = critic.model.path or critic.model.lora.enabled or critic.model.freeze
        named = "critic.model" if own else "actor_rollout_ref.model"
        yield RoleEngine("critic", "critic.engine", critic.engine, model, critic.optim, named)
    if has_reward_model(config):
        section = config.reward_model
        yield RoleEngine(
            REWARD_MODEL, "reward_model.engine", section.engine, section.model,
            model_key="reward_model.model",
        )  # fmt: skip


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
    megatron = {role: e for role, e in engines.items() if e.engine.name == "megatron"}
    if "actor" in megatron:
        _check_actor(config)
    for pool in role_pools(config, uses_of_run(config)):
        _check_same_degrees([e for role, e in megatron.items() if role in pool.roles])
    plan = batch_plan(config)
    for update, section in ((plan.actor, config.actor_rollout_ref.actor),
                            (plan.critic, config.critic)):  # fmt: skip
        if update.role in megatron:
            check_stages(
                megatron[update.role].key,
                megatron[update.role].engine,
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


def warn_of_offloads(config: TrainConfig | SFTConfig | RMConfig) -> None:
    """Log the settings that offload nothing, because the ranks compute on the CPU.

    They are no error: a file may hold them for the runs on other devices.
    """
    if planned_device(config.trainer) != "cpu":
        return
    if isinstance(config, TrainConfig):
        # Roles may have one engine's settings together.
        engines = {found.key: found.engine for found in role_engines(config)}
        turns = config.actor_rollout_ref.rollout.take_turns
    else:
        engines, turns = {"engine": config.engine}, False
    given = [f"{key}.{name}" for key, engine in engines.items() for name in engine.offloads]
    if turns:
        given.append("actor_rollout_ref.rollout.take_turns")
    if given:
        _log.warning(
            "without effect, because the ranks compute on the CPU, whose memory is that of the "
            "host: %s",
            ", ".join(f"{key}=true" for key in given),
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
    stages = engine.pipeline_parallel_size
    if engine.name != "megatron" or stages == 1:
        return
    if micro_batch is None:
        # Cut by tokens, the rows make at least `stages` micro-batches if there are as many rows.
        count, how = (rows, "rows") if engine.use_dynamic_bsz else (1, "use_dynamic_bsz=false")
    else:
        count = math.ceil(rows / micro_batch)
        how = f"{rows} rows in micro-batches of {micro_batch}"
    chunks = engine.virtual_pipeline_parallel_size
    if count < stages:
        idle = (stages - 1) / (chunks * count + stages - 1)
        computed = f"{chunks} * {count}" if chunks > 1 else f"{count}"
        raise ConfigError(
            f"{key}.pipeline_parallel_size={stages} stages need at least {stages} micro-batches, "
            f"but a mini-batch makes {count} on each data-parallel rank ({how}): each stage would "
            f"wait for ({stages} - 1) / ({computed} + {stages} - 1) = {idle:.0%} of a step; use "
            "smaller micro-batches, larger mini-batches or fewer stages",
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


def _check_actor(config: TrainConfig) -> None:
    """Check what the actor and its rollout cannot do with Megatron-core."""
    policy = config.actor_rollout_ref
    if policy.actor.reads_full_kl:
        raise ConfigError(
            f"{ACTOR}.kl_loss_type=full needs the logits of a token on one rank, and is not built "
            f"for {ACTOR}.engine.name=megatron; set kl_loss_type=k3, or engine.name=fsdp",
            key=f"{ACTOR}.kl_loss_type",
        )


_DEGREES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "expert_tensor_parallel_size",
)


def _check_same_degrees(engines: list[RoleEngine]) -> None:
    """Check that the Megatron engines of one process have the same degrees.

    Megatron-core keeps the groups of its ranks in one state of the process.
    """
    for other in engines[1:]:
        first = engines[0]
        for name in _DEGREES:
            sizes = _size(first.engine, name), _size(other.engine, name)
            if sizes[0] != sizes[1]:
                raise ConfigError(
                    f"{first.key}.{name}={sizes[0]} and {other.key}.{name}={sizes[1]}, but "
                    "Megatron engines of one process have the same ranks; set both equal, or give "
                    f"the {other.role} ranks of its own (placement.{other.role})",
                    key=f"{other.key}.{name}",
                )


def _size(engine: EngineConfig, name: str) -> int:
    """Return a degree, with the default of `expert_tensor_parallel_size` put in."""
    size: int | None = getattr(engine, name)
    return engine.tensor_parallel_size if size is None else size
