"""The worker groups of a run: which roles share processes, and how they start and stop."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quadriga.backends import get_backend
from quadriga.checkpoint.files import SavedFile
from quadriga.checkpoint.folders import (
    begin_checkpoint,
    commit_checkpoint,
    discard_checkpoint,
    prune_checkpoints,
)
from quadriga.config.plan import batch_plan, mini_batch_prompts
from quadriga.config.schema import SFTTrainerConfig, TrainConfig, TrainerConfig
from quadriga.errors import CheckpointError, ConfigError
from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.trainer.dataflow import needs_critic, needs_reference, reads_ref_log_prob
from quadriga.trainer.placement import ResourcePoolManager, Role
from quadriga.trainer.run.resuming import ControllerState
from quadriga.trainer.run.stopping import unchanged_handlers
from quadriga.workers.roles import (
    ActorGroup,
    CriticGroup,
    RefGroup,
    RolloutGroup,
    TurnTakingGroup,
    methods_of,
)
from quadriga.workers.runtime import RankRuntime

if TYPE_CHECKING:
    from quadriga.single_controller import Backend, ClassWithInitArgs, Worker, WorkerGroup

ALIVENESS_CHECK_S = 3.0
"""Seconds between two checks that every process of a group is alive. Calls notice a death by
themselves; the check finds it also in a role that no call waits for."""


@dataclass(frozen=True)
class StartedGroups:
    """The worker groups that a trainer has started, and their backend."""

    backend: Backend
    groups: Sequence[WorkerGroup]

    def close(self) -> None:
        """Stop every process of these groups, and the backend if this run started it."""
        for group in self.groups:
            group.shutdown()
        self.backend.shutdown()


@contextmanager
def close_on_error(backend: Backend) -> Iterator[list[WorkerGroup]]:
    """Yield a list for the groups that the block starts. If the block raises, stop them and the
    backend, so that a failed start leaves no process."""
    groups: list[WorkerGroup] = []
    try:
        yield groups
    except BaseException:
        StartedGroups(backend, groups).close()
        raise


@dataclass(frozen=True)
class PPOGroups(StartedGroups):
    """One view per role; views may share processes.

    `ref` is None if no stage reads `ref_log_prob`, `critic` is None if no stage reads `values`,
    `turns` is None unless the engines of the policy take turns in device memory.
    """

    actor: ActorGroup
    rollout: RolloutGroup
    ref: RefGroup | None
    critic: CriticGroup | None
    turns: TurnTakingGroup | None

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Give the device memory of the policy to the rollout within the block, then back."""
        if self.turns is None:
            yield
            return
        self.turns.rollout_mode()
        yield
        # Not after an error: it ends the run, and a call to a failed rank would hide it.
        self.turns.trainer_mode()

    def save(self, folder: Path, state: ControllerState, max_to_keep: int | None) -> None:
        """Save actor, critic and the controller's state as one checkpoint under `folder`.

        The checkpoint becomes visible by one rename at the end: a run that is killed before that
        leaves the earlier checkpoints, and no incomplete one.

        Raises:
            CheckpointError: a rank has reported no file, or one that the controller cannot see.
            InputError: the folder cannot be written.
        """
        partial = begin_checkpoint(folder, state.step)
        try:
            # Each call returns when all ranks have written, so the commit sees every file.
            actor = self.actor.save_checkpoint(str(partial / "actor"), state.step)
            files = reported_files("actor", actor)
            if self.critic is not None:
                critic = self.critic.save_checkpoint(str(partial / "critic"), state.step)
                files += reported_files("critic", critic)
            commit_checkpoint(partial, files, state.as_info())
        except BaseException:
            discard_checkpoint(partial)
            raise
        prune_checkpoints(folder, max_to_keep)

    def load(self, checkpoint: Path, step: int) -> None:
        """Load actor and critic from a folder that `save` wrote at `step`."""
        self.actor.load_checkpoint(str(checkpoint / "actor"), step)
        if self.critic is not None:
            self.critic.load_checkpoint(str(checkpoint / "critic"), step)


def reported_files(role: str, per_rank: Sequence[Sequence[SavedFile]]) -> list[SavedFile]:
    """Return the files of all ranks of a role, named relative to the folder of the checkpoint.

    Raises:
        CheckpointError: a rank has reported none.
    """
    for rank, files in enumerate(per_rank):
        if not files or not all(isinstance(file, SavedFile) for file in files):
            raise CheckpointError(
                f"rank {rank} of role {role} has reported no files: `save_checkpoint` returned "
                f"{files!r}, expected the list of `SavedFile` that `TrainEngine.save` returns"
            )
    return [file.under(role) for files in per_rank for file in files]


def gather(pending: Iterable[DataProtoFuture]) -> list[DataProto]:
    """Wait for every future and return the batches in the same order.

    Waits for: the calls behind the futures, which run side by side.
    Unblocked by: their results, or the first failure of any of them, whatever its place.
    """
    futures = list(pending)
    DataProtoFuture.wait_all(futures)
    return [future.get() for future in futures]


def start_groups(
    config: TrainConfig,
    *,
    total_steps: int,
    role_worker_mapping: Mapping[Role, type[Worker]],
    resource_pool_manager: ResourcePoolManager | None,
) -> PPOGroups:
    """Place the roles, start their processes and load their models.

    Roles that are mapped to one pool share the processes of one worker group.

    Raises:
        ConfigError: a worker class or the placement does not fit the settings.
        PlacementError: the nodes cannot hold the pools. Nothing was started.
    """
    backend = open_backend(config.trainer)
    with close_on_error(backend) as groups:
        policy = Role.ActorRolloutRef if needs_reference(config) else Role.ActorRollout
        roles = [policy, *([Role.Critic] if needs_critic(config) else [])]
        manager = resource_pool_manager or one_pool(config.trainer, roles, backend)
        check_reference_placement(config, policy, manager)
        classes = role_classes(config, policy, total_steps, role_worker_mapping)
        manager.create_resource_pool()
        # Roles of one pool are built in the same processes, so they share the device's memory and
        # their calls take turns. Roles of different pools run side by side.
        views: dict[str, WorkerGroup] = {}
        pool_of = {role: manager.pool_name(role) for role in roles}
        for pool in dict.fromkeys(pool_of.values()):
            members = {role.key: classes[role] for role in roles if pool_of[role] == pool}
            group: WorkerGroup = backend.worker_group(
                manager.resource_pool_dict[pool],
                backend.colocate(members),
                timeout=config.trainer.call_timeout_s,
            )
            groups.append(group)
            group.start_worker_aliveness_check(ALIVENESS_CHECK_S)
            views.update(group.spawn(members))
        for role in roles:
            views[role.key].init_model()
        # Actor, rollout and reference are three uses of one worker, hence of one view.
        view = views[policy.key]
        return PPOGroups(
            backend=backend,
            groups=groups,
            actor=view,
            rollout=view,
            ref=view if reads_ref_log_prob(config) else None,
            critic=views.get(Role.Critic.key),
            turns=view if config.actor_rollout_ref.rollout.take_turns else None,
        )


def check_reference_placement(
    config: TrainConfig, policy: Role, manager: ResourcePoolManager
) -> None:
    """Check that the reference is in the policy's processes if KL over the vocabulary needs it.

    Raises:
        ConfigError: the reference is mapped to another pool. Nothing was started.
    """
    pool, policy_pool = manager.mapping.get(Role.RefPolicy), manager.pool_name(policy)
    if config.actor_rollout_ref.actor.reads_full_kl and pool not in (None, policy_pool):
        raise ConfigError(
            "actor_rollout_ref.actor.kl_loss_type=full needs the logits of policy and reference in "
            f"one process, but role {Role.RefPolicy} is mapped to pool {pool!r} and the policy to "
            f"{policy_pool!r}; map both roles to one pool, or set kl_loss_type=k3",
            key="actor_rollout_ref.actor.kl_loss_type",
        )


def open_backend(trainer: TrainerConfig | SFTTrainerConfig) -> Backend:
    """Return the backend that the settings name, connected. Start Ray unless a cluster runs."""
    backend = get_backend(trainer.backend)
    with unchanged_handlers():
        backend.start(num_cpus=trainer.num_cpus)
    return backend


def one_pool(
    trainer: TrainerConfig | SFTTrainerConfig, roles: Iterable[Role], backend: Backend
) -> ResourcePoolManager:
    """Return a manager that maps every role to one pool of `nnodes × n_gpus_per_node` ranks."""
    return ResourcePoolManager(
        resource_pool_spec={"global": [trainer.n_gpus_per_node] * trainer.nnodes},
        mapping=dict.fromkeys(roles, "global"),
        backend=backend,
        pool_options={"use_gpu": uses_accelerator(trainer.device), "max_colocate_count": 1},
    )


def uses_accelerator(device: str) -> bool:
    """Return whether each rank needs an accelerator; `device` is a value of `trainer.device`."""
    from quadriga.parallel.device import get_device_name

    return (get_device_name() if device == "auto" else device) != "cpu"


def rank_runtime(config: TrainConfig, total_steps: int) -> RankRuntime:
    """Return what every rank of a role is told; `total_steps` counts its optimizer steps."""
    return RankRuntime(
        device=config.trainer.device,
        threads=threads_per_rank(config.trainer),
        seed=config.trainer.seed,
        total_steps=total_steps,
        max_response_length=config.data.max_response_length,
        user_files=tuple(config.algorithm.user_files),
    )


def threads_per_rank(trainer: TrainerConfig | SFTTrainerConfig) -> int:
    """Return `trainer.threads_per_worker`, or else the CPUs of a node divided by its ranks."""
    if trainer.threads_per_worker is not None:
        return trainer.threads_per_worker
    # Ranks of a node compute at the same time. With more threads than cores they would wait for
    # each other inside every matrix product.
    cpus = trainer.num_cpus or len(os.sched_getaffinity(0))
    return max(1, cpus // trainer.n_gpus_per_node)


def role_classes(
    config: TrainConfig,
    policy: Role,
    total_steps: int,
    mapping: Mapping[Role, type[Worker]],
) -> dict[Role, ClassWithInitArgs]:
    """Return each role's worker class with its arguments. The ranks build the workers.

    Raises:
        ConfigError: a class of `mapping` lacks a method that the trainer calls.
    """
    from quadriga.single_controller import ClassWithInitArgs
    from quadriga.workers import ActorRolloutRefWorker, CriticWorker

    arr = config.actor_rollout_ref
    actor_mini, critic_mini = mini_batch_prompts(config)
    arr = dataclasses.replace(
        arr, actor=dataclasses.replace(arr.actor, ppo_mini_batch_size=actor_mini)
    )
    critic = dataclasses.replace(
        config.critic,
        model=config.critic.model if config.critic.model.path else arr.model,
        ppo_mini_batch_size=critic_mini,
        ppo_epochs=config.critic.ppo_epochs or arr.actor.ppo_epochs,
    )
    # The schedule of a role counts the optimizer steps of that role.
    actor_steps, critic_steps = batch_plan(config).optimizer_steps(total_steps)
    policy_class = mapping.get(policy, ActorRolloutRefWorker)
    critic_class = mapping.get(Role.Critic, CriticWorker)
    reference = [RefGroup] if reads_ref_log_prob(config) else []
    turns = [TurnTakingGroup] if arr.rollout.take_turns else []
    check_methods(policy, policy_class, [ActorGroup, RolloutGroup, *reference, *turns])
    if needs_critic(config):
        check_methods(Role.Critic, critic_class, [CriticGroup])
    return {
        policy: ClassWithInitArgs(
            policy_class,
            config=arr,
            role=policy.key,
            runtime=rank_runtime(config, actor_steps),
        ),
        Role.Critic: ClassWithInitArgs(
            critic_class,
            config=critic,
            responses_per_prompt=arr.rollout.n,
            runtime=rank_runtime(config, critic_steps),
        ),
    }


def settings_for_classes(config: TrainConfig, mapping: Mapping[Role, type[Worker]]) -> TrainConfig:
    """Return the settings with which worker classes of the user get the fields that they expect.

    A class with an update or a pass of its own may read `old_log_probs`, so the pass is made unless
    the settings say otherwise.
    """
    from quadriga.workers import ActorRolloutRefWorker

    policy = config.actor_rollout_ref
    own = any(
        getattr(cls, name, None) not in (None, getattr(ActorRolloutRefWorker, name))
        for cls in mapping.values()
        for name in ("compute_log_prob", "update_actor")
    )
    if not own or policy.actor.old_log_probs_from_update is not None:
        return config
    actor = dataclasses.replace(policy.actor, old_log_probs_from_update=False)
    return dataclasses.replace(config, actor_rollout_ref=dataclasses.replace(policy, actor=actor))


def check_methods(role: Role, cls: type[Worker], protocols: Iterable[type]) -> None:
    """Check that a worker class has every method that the trainer calls for a role.

    Raises:
        ConfigError: names the methods that are missing or not registered.
    """
    from quadriga.single_controller.dispatch.register import registered_methods

    missing = [name for name in methods_of(protocols) if name not in registered_methods(cls)]
    if missing:
        raise ConfigError(
            f"role {role}: the trainer calls {', '.join(missing)}, but {cls.__name__} has no such "
            "registered method; define it and mark it with @register",
        )
