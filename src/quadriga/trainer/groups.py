"""The worker groups of a run: which classes share which processes, started and stopped together."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quadriga.backends import get_backend
from quadriga.checkpoint.folders import (
    begin_checkpoint,
    commit_checkpoint,
    prune_checkpoints,
)
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError
from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.trainer.placement import ResourcePoolManager, Role
from quadriga.trainer.resuming import ControllerState
from quadriga.workers.runtime import RankRuntime


@dataclass
class PPOGroups:
    """One view per role; views may share processes. `ref` and `critic` are None if not needed."""

    actor: Any
    rollout: Any
    ref: Any
    critic: Any
    backend: Any
    groups: list[Any]

    def save(self, folder: Path, state: ControllerState, max_to_keep: int | None) -> None:
        """One checkpoint of actor and critic: all of it, or, if the run dies meanwhile, none."""
        partial = begin_checkpoint(folder, state.step)
        for name, view in (("actor", self.actor), ("critic", self.critic)):
            if view is not None:
                view.save_checkpoint(str(partial / name))
        commit_checkpoint(partial, state.as_info())
        prune_checkpoints(folder, max_to_keep)

    def load(self, checkpoint: Path, step: int) -> None:
        """Take up actor and critic where `save` left them."""
        self.actor.load_checkpoint(str(checkpoint / "actor"), step)
        if self.critic is not None:
            self.critic.load_checkpoint(str(checkpoint / "critic"))

    def close(self) -> None:
        """Stop every process of these groups, and the backend if it was started here."""
        for group in self.groups:
            group.shutdown()
        self.backend.shutdown()


def gather(pending: Iterable[Any]) -> list[DataProto]:
    """Wait for every item, in order; items that are already batches pass through.

    Waits for: the calls behind the futures. Unblocked by: their results, or the first failure.
    """
    return [item.get() if isinstance(item, DataProtoFuture) else item for item in pending]


WATCH_S = 3.0
"""How often it is looked whether every process lives, also of roles that no call waits for."""


def start_groups(
    config: TrainConfig,
    *,
    total_steps: int,
    use_critic: bool,
    use_reference: bool,
    role_worker_mapping: dict[Role, type],
    resource_pool_manager: ResourcePoolManager | None,
) -> PPOGroups:
    """Place the roles, start their processes, load their models."""
    backend = open_backend(config.trainer)
    policy = Role.ActorRolloutRef if use_reference else Role.ActorRollout
    roles = [policy, *([Role.Critic] if use_critic else [])]
    manager = resource_pool_manager or one_pool(config.trainer, roles, backend)
    check_reference_placement(config, policy, manager)
    manager.create_resource_pool()
    classes = role_classes(config, policy, total_steps, role_worker_mapping)

    by_pool: dict[str, list[Role]] = defaultdict(list)
    for role in roles:
        by_pool[manager.mapping[role]].append(role)
    groups, views = [], {}
    for members in by_pool.values():
        colocated = backend.colocate({role.key: classes[role] for role in members})
        group = backend.worker_group(
            manager.get_resource_pool(members[0]),
            colocated,
            timeout=config.trainer.call_timeout_s,
        )
        group.start_worker_aliveness_check(WATCH_S)
        groups.append(group)
        views.update(group.spawn({role.key for role in members}))
    for role in roles:
        views[role.key].init_model()
    actor = views[policy.key]
    return PPOGroups(
        actor=actor,
        rollout=actor,
        ref=actor if use_reference else None,
        critic=views.get(Role.Critic.key),
        backend=backend,
        groups=groups,
    )


def check_reference_placement(
    config: TrainConfig, policy: Role, manager: ResourcePoolManager
) -> None:
    """KL over the vocabulary needs the reference in the policy's processes.

    Raises:
        ConfigError: the reference is mapped to another pool. Nothing was started.
    """
    pool = manager.mapping.get(Role.RefPolicy)
    if config.actor_rollout_ref.actor.reads_full_kl and pool not in (None, manager.mapping[policy]):
        raise ConfigError(
            "actor_rollout_ref.actor.kl_loss_type=full computes the reference beside the policy, "
            f"micro-batch by micro-batch, but role {Role.RefPolicy} is mapped to pool {pool!r} and "
            f"the policy to {manager.mapping[policy]!r}; map both to one pool, or choose k3",
            key="actor_rollout_ref.actor.kl_loss_type",
        )


def open_backend(trainer: Any) -> Any:
    """The backend that the settings name, connected (Ray is started here unless one runs)."""
    backend = get_backend(trainer.backend)
    backend.start(num_cpus=trainer.num_cpus)
    return backend


def one_pool(trainer: Any, roles: list[Role], backend: Any) -> ResourcePoolManager:
    """Every role on one pool of `nnodes × n_gpus_per_node` ranks."""
    return ResourcePoolManager(
        resource_pool_spec={"global": [trainer.n_gpus_per_node] * trainer.nnodes},
        mapping=dict.fromkeys(roles, "global"),
        backend=backend,
        pool_options={"use_gpu": uses_accelerator(trainer.device), "max_colocate_count": 1},
    )


def uses_accelerator(device: str) -> bool:
    """Whether ranks need an accelerator each."""
    from quadriga.parallel.device import get_device_name

    return (get_device_name() if device == "auto" else device) != "cpu"


def rank_runtime(config: TrainConfig, total_steps: int) -> RankRuntime:
    """What every rank is told. CPU ranks share the node's cores evenly."""
    return RankRuntime(
        device=config.trainer.device,
        threads=threads_per_rank(config.trainer),
        seed=config.trainer.seed,
        total_steps=total_steps,
        max_response_length=config.data.max_response_length,
        user_files=tuple(config.algorithm.user_files),
    )


def threads_per_rank(trainer: Any) -> int:
    """`trainer.threads_per_worker`, or the CPUs over the ranks of a node."""
    if trainer.threads_per_worker is not None:
        return int(trainer.threads_per_worker)
    cpus = trainer.num_cpus or len(os.sched_getaffinity(0))
    return max(1, cpus // trainer.n_gpus_per_node)


def role_classes(
    config: TrainConfig, policy: Role, total_steps: int, mapping: dict[Role, type]
) -> dict[Role, Any]:
    """Role → worker class with its arguments, to be built in the rank's process."""
    from quadriga.single_controller import ClassWithInitArgs
    from quadriga.workers import ActorRolloutRefWorker, CriticWorker

    arr = config.actor_rollout_ref
    steps_per_batch = arr.actor.ppo_epochs * max(
        1, config.data.train_batch_size // arr.actor.ppo_mini_batch_size
    )
    runtime = rank_runtime(config, total_steps * steps_per_batch)
    critic = dataclasses.replace(
        config.critic,
        model=config.critic.model if config.critic.model.path else arr.model,
        ppo_mini_batch_size=config.critic.ppo_mini_batch_size or arr.actor.ppo_mini_batch_size,
        ppo_epochs=config.critic.ppo_epochs or arr.actor.ppo_epochs,
    )
    return {
        policy: ClassWithInitArgs(
            mapping.get(policy, ActorRolloutRefWorker), config=arr, role=policy.key, runtime=runtime
        ),
        Role.Critic: ClassWithInitArgs(
            mapping.get(Role.Critic, CriticWorker),
            config=critic,
            responses_per_prompt=arr.rollout.n,
            runtime=runtime,
        ),
    }
