"""The host memory of a run: models while they are loaded, and what settings keep on the host.

A rank reads its shards only, unless the tensors of the folder are not one-to-one with the model's
parameters (many models with experts); then each rank has the whole model on the host while it
loads. The rollout `hf` is loaded whole. On a CPU this is the memory in which the run computes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from quadriga.config.role_ranks import base_is_in_actor, has_reward_model
from quadriga.config.schema import EngineConfig, ModelConfig, RunConfig, TrainConfig
from quadriga.engines.base import HeadKind
from quadriga.engines.loading import whole_load_reason
from quadriga.engines.memory.states import TrainingMemory
from quadriga.models.folder import local_folder
from quadriga.parallel.device import compute_dtype
from quadriga.trainer.memory.machine import DeviceLimit, available_memory, gib, gib_apart
from quadriga.trainer.memory.phases import (
    ACTOR,
    CRITIC,
    PROCESS_BYTES,
    REF,
    REWARD_MODEL,
    TRAINING,
    PoolMemory,
    engine_settings,
)
from quadriga.trainer.memory.plan import MemoryPlan
from quadriga.trainer.roles.needed import critic_model, needs_critic, needs_reference

OFFLOADED, LOADED = "offloaded states", "models while they are loaded"
FILES = "weight files in shared memory"


@dataclass(frozen=True)
class HostedEngine:
    """What a training engine needs of the host depends on this.

    Attributes:
        key: the section of its settings.
        trained: whether its weights are trained.
    """

    key: str
    engine: EngineConfig
    model: ModelConfig
    head: HeadKind
    trained: bool


@dataclass(frozen=True)
class HostSettings:
    """The settings on which the host memory of a run depends.

    Attributes:
        engines: role -> its training engine.
        models: those that are loaded without a training engine.
        take_turns: whether the engines of the policy are on the host during generation.
    """

    trainer: RunConfig
    engines: Mapping[str, HostedEngine]
    models: tuple[ModelConfig, ...] = ()
    take_turns: bool = False


@dataclass(frozen=True)
class HostMemory:
    """Bytes in the memory of the node that needs most.

    Attributes:
        parts: what -> bytes of all ranks of the node.
        whole: role -> why each of its ranks loads the whole model.
    """

    parts: Mapping[str, int]
    whole: Mapping[str, str]

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return sum(self.parts.values())


def host_settings(config: TrainConfig) -> HostSettings:
    """Return what the host memory of `quadriga train` depends on."""
    policy = config.actor_rollout_ref
    engines = {ACTOR: _engine(config, ACTOR, policy.model, "lm", trained=True)}
    if needs_reference(config) and not base_is_in_actor(config):
        engines[REF] = _engine(config, REF, policy.model.frozen(), "lm", trained=False)
    if needs_critic(config):
        engines[CRITIC] = _engine(config, CRITIC, critic_model(config), "value", trained=True)
    if has_reward_model(config):
        model = config.reward_model.model
        engines[REWARD_MODEL] = _engine(config, REWARD_MODEL, model, "score", trained=False)
    return HostSettings(config.trainer, engines, take_turns=policy.rollout.take_turns)


def _engine(
    config: TrainConfig, role: str, model: ModelConfig, head: HeadKind, *, trained: bool
) -> HostedEngine:
    section = role if role in (CRITIC, REWARD_MODEL) else f"actor_rollout_ref.{role}"
    return HostedEngine(f"{section}.engine", engine_settings(config, role), model, head, trained)


def host_memory(settings: HostSettings, plan: MemoryPlan) -> HostMemory:
    """Return the host memory of a run whose memory was planned."""
    whole = whole_models(settings)
    nodes: dict[int, Counter[str]] = {}
    for pool in plan.pools:
        counts = Counter(rank // plan.ranks_per_node for rank in pool.pool.ranks)
        own = _parts_of_rank(settings, plan.device_type, pool, whole)
        for node, count in counts.items():
            parts = nodes.setdefault(node, Counter())
            parts.update({name: count * size for name, size in own.items()})
    for parts in nodes.values():
        parts.update(_shared_parts(settings))
    largest = max(nodes.values(), key=lambda parts: sum(parts.values()))
    return HostMemory({name: size for name, size in largest.items() if size}, whole)


def host_limit(
    trainer: RunConfig, plan: MemoryPlan, device: DeviceLimit | None
) -> DeviceLimit | None:
    """Return the host memory of a node; None if it is not known, because the ranks are on others.

    `device`: the limit of the device, which on a CPU is that of the host.
    """
    if plan.device_type == "cpu":
        return device
    elsewhere = trainer.nnodes > 1 or "RAY_ADDRESS" in os.environ
    if trainer.backend == "ray" and elsewhere:
        return None
    return DeviceLimit(available_memory(), "available on this machine")


def whole_models(settings: HostSettings) -> dict[str, str]:
    """Return role -> why each of its ranks loads the whole model, for those that do."""
    found = {
        role: whole_load_reason(own.model, own.head, own.trained)
        for role, own in settings.engines.items()
    }
    return {role: reason for role, reason in found.items() if reason}


def _parts_of_rank(
    settings: HostSettings, device_type: str, pool: PoolMemory, whole: Mapping[str, str]
) -> dict[str, int]:
    on_cpu = device_type == "cpu"
    process = PROCESS_BYTES["cpu" if on_cpu else "accelerator"]
    loading, kept = _loading(settings, device_type, pool, whole), _kept_on_host(settings, pool)
    if on_cpu:  # what is kept there is in the plan of the device
        return {"processes": process, LOADED: loading}
    # Moments are made in the first step, when no model is loaded any more.
    name = OFFLOADED if kept > loading else LOADED
    return {"processes": process, name: max(kept, loading)}


def _loading(
    settings: HostSettings, device_type: str, pool: PoolMemory, whole: Mapping[str, str]
) -> int:
    """Return the most bytes of a rank while its models are loaded, one after the other."""
    held = largest = 0
    for role in TRAINING:
        if role in pool.engines:
            engine = pool.engines[role]
            size = engine.weights * _item_size(settings.engines[role], device_type)
            own = engine.parameters if device_type == "cpu" else 0
            largest = max(largest, held + (size if role in whole else own))
            held += own
    if pool.generation is not None:  # loaded after the engines of the policy
        largest = max(largest, held + pool.generation.loaded)
    return largest


def _item_size(own: HostedEngine, device_type: str) -> int:
    """Return the bytes of an element as a whole model has it: float32 at least if it is trained."""
    auto = torch.device("cpu" if device_type == "cpu" else "meta")
    size = compute_dtype(own.engine.dtype, auto).itemsize
    return max(4, size) if own.trained else size


def _kept_on_host(settings: HostSettings, pool: PoolMemory) -> int:
    """Return the most bytes that the settings keep on the host of an accelerator."""
    engines = pool.engines
    kept = {role: _kept_of_engine(settings.engines[role].engine, e) for role, e in engines.items()}
    if not settings.take_turns or pool.generation is None:
        return sum(kept.values())
    turns = [role for role in (ACTOR, REF) if role in engines]
    states = {r: e.parameters + e.optimizer + e.on_host for r, e in engines.items()}
    generating = sum(states[role] if role in turns else kept[role] for role in engines)
    return max(generating, sum(kept.values()) + pool.generation.backup)


def _kept_of_engine(settings: EngineConfig, engine: TrainingMemory) -> int:
    parameters = engine.parameters if settings.param_offload else 0
    return engine.on_host + parameters + (engine.optimizer if settings.optimizer_offload else 0)


def _shared_parts(settings: HostSettings) -> dict[str, int]:
    """Return what the ranks of a node share: with `use_shm` the files of the weights."""
    models = [*(own.model for own in settings.engines.values()), *settings.models]
    folders = {
        local_folder(model.path, weights=False) for model in models if model.use_shm and model.path
    }
    files = [file for folder in folders for file in folder.glob("*.safetensors")]
    return {FILES: sum(file.stat().st_size for file in files)}


def host_shortage(memory: HostMemory, limit: DeviceLimit) -> str | None:
    """Return why the host memory does not suffice, as a sentence without its end. None: it does."""
    if memory.total <= limit.size:
        return None
    sums = " + ".join(f"{gib(size)} ({name})" for name, size in memory.parts.items())
    reasons = "; ".join(f"{role}: {reason}" for role, reason in memory.whole.items())
    loaded = f"; each rank loads whole models ({reasons})" if reasons else ""
    needed, given = gib_apart(memory.total, limit.size)
    return (
        f"the ranks of a node need {needed} GiB of host memory = {sums}, but "
        f"{given} GiB are {limit.source}{loaded}"
    )


def host_remedies(settings: HostSettings, memory: HostMemory) -> Iterator[str]:
    """Yield what to change if the host memory does not suffice."""
    if OFFLOADED in memory.parts:
        set_here = [
            f"{own.key}.{name}=false"
            for own in settings.engines.values()
            for name in own.engine.offloads
        ]
        if settings.take_turns:
            set_here.append("actor_rollout_ref.rollout.take_turns=false")
        yield f"keep states on the devices ({', '.join(set_here)})"
    if FILES in memory.parts:
        yield "set use_shm=false of the models"
    if settings.trainer.n_gpus_per_node > 1:
        yield "use fewer ranks of a node (trainer.n_gpus_per_node)"
    yield "use hosts with more memory, or a smaller model"
