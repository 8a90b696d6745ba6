"""How much of what the engines of a pool need exists at once on a rank.

Roles of one pool share the processes and the device of each rank. While one of them computes, the
others hold their parameters and moments, unless the settings offload them:

    phase                  actor                      rollout         critic
    generation             parameters, moments        weights, peak   parameters, moments
    log-probabilities      … and peak of the pass     weights         parameters, moments
    update of the actor    … and peak of the update   weights         parameters, moments

vLLM and SGLang also keep their keys and values all the time. With `rollout.take_turns` the rollout
has nothing on an accelerator while others compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from quadriga.config.role_ranks import RolePool
from quadriga.config.schema import EngineConfig, TrainConfig
from quadriga.engines.memory.states import TrainingMemory
from quadriga.parallel.device import compute_dtype
from quadriga.rollout.memory import GenerationMemory
from quadriga.rollout.reserved import CONTEXT_BYTES
from quadriga.trainer.memory.machine import GIB

PROCESS_BYTES = {"cpu": GIB // 2, "accelerator": CONTEXT_BYTES}
"""What a rank needs beside tensors: Python and libraries; on an accelerator the context of the
device and the buffers of its collectives. Rounded figures, not measured for each machine."""

ACTOR, ROLLOUT, REF, CRITIC, REWARD_MODEL = "actor", "rollout", "ref", "critic", "reward_model"
TRAINING = (ACTOR, REF, CRITIC, REWARD_MODEL)
"""The roles with a training engine."""


Part = Literal["processes", "states", "all"]
"""What of a plan is counted: processes; with parameters, gradients and moments; everything."""


@dataclass(frozen=True)
class PoolMemory:
    """Bytes of one rank of a pool.

    Attributes:
        engines: role → its training engine.
        generation: the rollout engine, if the pool has it.
        phases: phase → the bytes that exist at once, the process itself included.
        states: the same without activations and KV cache, in the largest phase.
        processes: the processes alone, which all phases include.
    """

    pool: RolePool
    engines: Mapping[str, TrainingMemory]
    generation: GenerationMemory | None
    phases: Mapping[str, int]
    states: int
    processes: int

    @property
    def largest(self) -> tuple[str, int]:
        """The phase in which most bytes exist, and these bytes."""
        return max(self.phases.items(), key=lambda item: item[1])

    def bytes_of(self, part: Part) -> int:
        """Return the most bytes of a part that exist at once on a rank."""
        if part == "processes":
            return self.processes
        return self.states if part == "states" else self.largest[1]


PASSES = {
    ACTOR: "old log-probabilities",
    REF: "reference log-probabilities",
    CRITIC: "values",
    REWARD_MODEL: "scores of the reward model",
}


def pool_memory(
    config: TrainConfig,
    device_type: str,
    pool: RolePool,
    engines: Mapping[str, TrainingMemory],
    generation: GenerationMemory | None,
    *,
    syncs: bool = True,
) -> PoolMemory:
    """Return how much of what these engines need exists at once on a rank of the pool.

    `syncs`: whether the weights of an actor are sent to a rollout, in this pool or another one.
    """
    phases = _Phases(config, device_type, engines, generation, len(pool.ranks), syncs)
    return PoolMemory(
        pool=pool,
        engines=engines,
        generation=generation,
        phases=phases.bytes_of_each(lambda peak, _: peak),
        states=max(phases.bytes_of_each(lambda _, states: states).values()),
        processes=phases.process_bytes(),
    )


def engine_settings(config: TrainConfig, role: str) -> EngineConfig:
    """Return the settings of the training engine of a role."""
    if role == REWARD_MODEL:  # a role of a user in its place has a section of another class
        return config.reward_model.engine
    policy = config.actor_rollout_ref
    return {
        ACTOR: policy.actor.engine,
        REF: policy.ref.engine,
        CRITIC: config.critic.engine,
    }[role]


_Choice = Callable[[int, int], int]
"""See `_Phases.bytes_of_each`."""


@dataclass(frozen=True)
class _Phases:
    """The phases of a step in the processes of one pool."""

    config: TrainConfig
    device_type: str
    engines: Mapping[str, TrainingMemory]
    generation: GenerationMemory | None
    ranks: int
    syncs: bool

    def bytes_of_each(self, part: _Choice) -> dict[str, int]:
        """Return phase → bytes.

        `part` receives what a call adds at most, and how much of it are whole or sharded gradients,
        and returns the one that is asked for.
        """
        policy = self.config.actor_rollout_ref
        found: dict[str, int] = {}
        if self.generation is not None:
            held = sum(self._held(role, generating=True) for role in self.engines)
            found["generation"] = held + self._rollout_weights + part(self.generation.peak, 0)
        for role, engine in self.engines.items():
            if engine.evaluate is not None and not (role == REF and policy.actor.reads_full_kl):
                peak = part(engine.evaluate_peak, 0)
                held = self._others(role, part) + self._loaded(role, moments=False)
                found[PASSES[role]] = held + peak
            if engine.update is not None:
                peak = part(engine.backward_peak, engine.gradients)
                if role == ACTOR and policy.actor.reads_full_kl:
                    reference = self.engines.get(REF, engine)
                    peak += part(reference.evaluate_peak, 0)
                # Offloaded moments are on the device only while the parameters are updated.
                step = part(engine.step_peak, min(engine.gradients, engine.step_peak))
                found[f"update of the {role}"] = self._others(role, part) + max(
                    self._loaded(role, moments=False) + peak,
                    self._loaded(role, moments=True) + step,
                )
        if ACTOR in self.engines and self.syncs:
            found["weight sync"] = self._sync(part) + self._sync_buffers()
        if not found:  # all roles of the pool are uncounted, but its processes are not
            found["processes alone"] = 0
        beside = self.process_bytes()
        return {phase: beside + size for phase, size in found.items()}

    def process_bytes(self) -> int:
        """Return what the processes of a rank need beside tensors."""
        return (
            self._processes() * PROCESS_BYTES["cpu" if self.device_type == "cpu" else "accelerator"]
        )

    def _processes(self) -> int:
        """Return the processes of a rank that have a context on its device."""
        beside = self.generation.processes if self.generation else 0
        # A rank that only sends requests to the process of an engine does not use the device.
        only_asks = beside and not self.engines and self.device_type != "cpu"
        return beside if only_asks else 1 + beside

    def _sync(self, part: _Choice) -> int:
        """Return what exists during a weight sync, without its buffers."""
        held = self._others(ACTOR, part) + self._loaded(ACTOR, moments=False)
        if self.generation is None:
            return held
        # Before the first sync the rollout has weights of its own, also if it shares them then.
        if not self._turns:
            return held + self.generation.weights - self._rollout_weights
        # It was not released before the first sync, when there are no moments. Later vLLM and
        # SGLang get back the memory of their weights, and hf writes to host memory.
        states = sum(engine.parameters + engine.kept for engine in self.engines.values())
        first = states + self.generation.weights + part(self.generation.reserved, 0)
        hosted = self.config.actor_rollout_ref.rollout.name == "hf"
        return max(first, held + (0 if hosted else self.generation.weights))

    def _sync_buffers(self) -> int:
        """Return the bytes of one whole weight in both dtypes, and of weights in flight."""
        engine = self.engines[ACTOR]
        weight = 8 * engine.largest_weight
        # No bucket is larger than the model, and larger weights are split.
        limit = self.config.actor_rollout_ref.rollout.weight_bucket_mb << 20
        bucket = min(limit, 4 * engine.weights)
        if self.generation is not None:
            # The buffers of two rounds, and the weights of two rounds that are not complete.
            return weight + (0 if self._whole else 2 * bucket)
        # On a CPU: one part is packed while the parts of two rounds are in the store.
        return weight + (3 * bucket if self.device_type == "cpu" else 0)

    def _others(self, own: str, part: _Choice) -> int:
        """Return what the other roles hold while `own` computes."""
        held = sum(self._held(role) for role in self.engines if role != own)
        if self.generation is None or self._turns:  # released after each generation
            return held
        return held + self._rollout_weights + part(self.generation.reserved, 0)

    @property
    def _rollout_weights(self) -> int:
        """The bytes of the weights that the rollout holds itself. It uses the tensors of the actor
        where these are whole, but for those that adapters are merged into, or that have another
        dtype."""
        if self.generation is None:
            return 0
        rollout, actor = self.config.actor_rollout_ref.rollout, self.engines.get(ACTOR)
        shared = rollout.share_weights and rollout.name == "hf" and not rollout.take_turns
        if not shared or actor is None or not self._whole:
            return self.generation.weights
        engine = engine_settings(self.config, ACTOR)
        hosted = engine.offload_policy and self.device_type != "cpu"
        if engine.param_offload or hosted or engine.name == "megatron":  # it is sent other tensors
            return self.generation.weights
        device = torch.device("cpu" if self.device_type == "cpu" else "meta")
        held, computed = (compute_dtype(dtype, device) for dtype in (rollout.dtype, engine.dtype))
        own = actor.adapted
        own += actor.frozen if computed != held else 0
        own += actor.trained if torch.promote_types(computed, torch.float32) != held else 0
        return min(own * held.itemsize, self.generation.weights)

    @property
    def _whole(self) -> bool:
        """Whether each rank has whole weights of the actor."""
        engine = engine_settings(self.config, ACTOR)
        return self.ranks == 1 or (engine.fsdp_size == 1 and engine.tensor_parallel_size == 1)

    def _held(self, role: str, *, generating: bool = False) -> int:
        """Return what a training engine holds while another role computes."""
        if generating and self._turns and role in (ACTOR, REF):
            return 0
        engine, settings = self.engines[role], engine_settings(self.config, role)
        offloads = self.device_type != "cpu"
        kept = engine.parameters + engine.kept
        parameters = 0 if offloads and settings.param_offload else kept
        return parameters + (0 if offloads and settings.optimizer_offload else engine.optimizer)

    def _loaded(self, role: str, *, moments: bool) -> int:
        """Return what a training engine holds while it computes."""
        engine, offloads = self.engines[role], self.device_type != "cpu"
        kept = not (offloads and engine_settings(self.config, role).optimizer_offload)
        return engine.parameters + engine.kept + (engine.optimizer if moments or kept else 0)

    @property
    def _turns(self) -> bool:
        return self.config.actor_rollout_ref.rollout.take_turns and self.device_type != "cpu"
