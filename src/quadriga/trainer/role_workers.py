"""Which roles of a run share processes, and the worker class and arguments of each process.

Example: actor and reference on one pool, rollout and critic on pools of their own:

    pool       worker key   worker
    a          actor_ref    ActorRolloutRefWorker(role="actor_ref")
    b          rollout      ActorRolloutRefWorker(role="rollout")
    c          critic       CriticWorker
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from quadriga.config.plan import batch_plan, mini_batch_prompts
from quadriga.config.role_ranks import has_reward_model
from quadriga.config.schema import (
    RunConfig,
    TrainConfig,
)
from quadriga.errors import ConfigError
from quadriga.models.folder import with_absolute_paths
from quadriga.single_controller import ClassWithInitArgs, Worker
from quadriga.trainer.roles.checks import check_mapping, worker_of
from quadriga.trainer.roles.needed import (
    CRITIC,
    REWARD_MODEL,
    critic_model,
    reads_ref_log_prob,
)
from quadriga.trainer.roles.placement import ResourcePoolManager, Role
from quadriga.trainer.roles.pools import ROLES_OF_USE, pool_manager, uses_by_pool, workers_of
from quadriga.trainer.roles.registry import added_roles
from quadriga.trainer.roles.start_order import start_order
from quadriga.workers.roles import (
    ActorGroup,
    CriticGroup,
    ReceivingGroup,
    RefGroup,
    RewardModelGroup,
    RolloutGroup,
    SendingGroup,
    TurnTakingGroup,
    methods_of,
)
from quadriga.workers.runtime import RankRuntime


def check_roles(
    config: TrainConfig,
    mapping: Mapping[Role, type[Worker]],
    manager: ResourcePoolManager | None,
) -> None:
    """Check the added roles before any process starts: classes, pools and start order.

    Args:
        mapping: role → a class in place of the built-in or registered one.
        manager: the pools of a program; None: those of the settings.

    Raises:
        ConfigError: a class, a pool or the start order does not fit.
    """
    added = added_roles(config)
    own = (Role.RewardModel,) if has_reward_model(config) else ()
    check_mapping(mapping, added, "role_worker_mapping", own)
    if manager is not None:
        check_mapping(manager.mapping, added, "the mapping of resource_pool_manager", own)
    for role in added:
        worker_of(role, config, mapping, RankRuntime())
    if added:
        pools = uses_by_pool(config, manager or pool_manager(config, None))
        start_order(workers_of(pools), added)


def worker_classes(
    config: TrainConfig,
    workers: Mapping[str, Sequence[str]],
    total_steps: int,
    mapping: Mapping[Role, type[Worker]],
) -> dict[str, ClassWithInitArgs]:
    """Return the class of each worker with its arguments. The ranks build the workers.

    Args:
        workers: worker key → its uses, over all pools.
        total_steps: training steps of the run.
        mapping: role → a class in place of the built-in one.

    Raises:
        ConfigError: a class of `mapping` lacks a method that the trainer calls.
    """
    added = {role.key: role for role in added_roles(config)}
    # The schedule of a role counts the optimizer steps of that role.
    actor_steps, critic_steps = batch_plan(config).optimizer_steps(total_steps)
    apart = not any({"actor", "rollout"} <= set(uses) for uses in workers.values())
    classes: dict[str, ClassWithInitArgs] = {}
    for key, uses in workers.items():
        if key in added:
            runtime = rank_runtime(config, total_steps)
            classes[key] = worker_of(added[key], config, mapping, runtime)
            continue
        worker_class = _worker_class(key, uses, mapping)
        check_methods(key, worker_class, _protocols(config, uses, apart))
        if key == CRITIC:
            classes[key] = _critic(config, worker_class, rank_runtime(config, critic_steps))
        elif key == REWARD_MODEL:
            classes[key] = _reward_model(config, worker_class, rank_runtime(config, total_steps))
        else:
            classes[key] = _policy(config, worker_class, key, rank_runtime(config, actor_steps))
    return classes


def _policy(
    config: TrainConfig, worker_class: type[Worker], key: str, runtime: RankRuntime
) -> ClassWithInitArgs:
    settings = config.actor_rollout_ref
    mini_batch, _ = mini_batch_prompts(config)
    actor = dataclasses.replace(settings.actor, ppo_mini_batch_size=mini_batch)
    return ClassWithInitArgs(
        worker_class,
        config=dataclasses.replace(
            settings, actor=actor, model=with_absolute_paths(settings.model)
        ),
        role=key,
        runtime=runtime,
    )


def _critic(
    config: TrainConfig, worker_class: type[Worker], runtime: RankRuntime
) -> ClassWithInitArgs:
    policy, critic = config.actor_rollout_ref, config.critic
    _, mini_batch = mini_batch_prompts(config)
    return ClassWithInitArgs(
        worker_class,
        config=dataclasses.replace(
            critic,
            model=with_absolute_paths(critic_model(config)),
            ppo_mini_batch_size=mini_batch,
            ppo_epochs=critic.ppo_epochs or policy.actor.ppo_epochs,
        ),
        responses_per_prompt=policy.rollout.n,
        runtime=runtime,
    )


def _reward_model(
    config: TrainConfig, worker_class: type[Worker], runtime: RankRuntime
) -> ClassWithInitArgs:
    settings = config.reward_model
    return ClassWithInitArgs(
        worker_class,
        config=dataclasses.replace(settings, model=with_absolute_paths(settings.model)),
        policy=with_absolute_paths(config.actor_rollout_ref.model.frozen()),
        policy_arguments=config.data.chat_template_kwargs,
        runtime=runtime,
    )


def _worker_class(
    key: str, uses: Sequence[str], mapping: Mapping[Role, type[Worker]]
) -> type[Worker]:
    """Return the class of the role with this key, else of a role that contains the uses."""
    from quadriga.workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker

    exact = [role for role in mapping if role.key == key]
    roles = [*exact, *(role for use in uses for role in ROLES_OF_USE[use])]
    built_in: dict[str, type[Worker]] = {CRITIC: CriticWorker, REWARD_MODEL: RewardModelWorker}
    default = built_in.get(key, ActorRolloutRefWorker)
    return next((mapping[role] for role in roles if role in mapping), default)


def _protocols(config: TrainConfig, uses: Sequence[str], apart: bool) -> list[type]:
    """Return the protocols of the methods that the trainer calls on a worker with these uses."""
    needed: dict[str, list[type]] = {
        "actor": [
            ActorGroup,
            *([SendingGroup] if apart else []),
            *([TurnTakingGroup] if config.actor_rollout_ref.rollout.take_turns else []),
        ],
        "rollout": [RolloutGroup, *([ReceivingGroup] if apart else [])],
        "ref": [RefGroup] if reads_ref_log_prob(config) else [],
        CRITIC: [CriticGroup],
        REWARD_MODEL: [RewardModelGroup],
    }
    return [protocol for use in uses for protocol in needed[use]]


def settings_for_classes(config: TrainConfig, mapping: Mapping[Role, type[Worker]]) -> TrainConfig:
    """Return the settings with which worker classes of the user get the fields that they expect.

    A class with an update or a pass of its own may read `old_log_probs`, so the pass is made unless
    the settings say otherwise. It may read them, or what the pass writes, also in rows whose
    advantages are all 0.

    Raises:
        ConfigError: the settings insist on leaving such rows out.
    """
    from quadriga.workers import ActorRolloutRefWorker

    policy = config.actor_rollout_ref
    own = any(
        getattr(cls, name, None) not in (None, getattr(ActorRolloutRefWorker, name))
        for cls in mapping.values()
        for name in ("compute_log_prob", "update_actor")
    )
    if not own:
        return config
    if policy.actor.skip_zero_advantages:
        key = "actor_rollout_ref.actor.skip_zero_advantages"
        raise ConfigError(
            f"{key}=true cannot be kept: a worker class with a compute_log_prob or an update_actor "
            "of its own may read every row; set it to null or false",
            key=key,
        )
    actor = dataclasses.replace(
        policy.actor,
        old_log_probs_from_update=bool(policy.actor.old_log_probs_from_update),
        skip_zero_advantages=False,
    )
    return dataclasses.replace(config, actor_rollout_ref=dataclasses.replace(policy, actor=actor))


def check_methods(key: str, cls: type[Worker], protocols: Iterable[type]) -> None:
    """Check that a worker class has every method that the trainer calls for a role.

    Raises:
        ConfigError: names the methods that are missing or not registered.
    """
    from quadriga.single_controller.dispatch import registered_methods

    missing = [name for name in methods_of(protocols) if name not in registered_methods(cls)]
    if missing:
        raise ConfigError(
            f"role {key}: the trainer calls {', '.join(missing)}, but {cls.__name__} has no such "
            "registered method; define it and mark it with @register",
        )


def rank_runtime(config: TrainConfig, total_steps: int) -> RankRuntime:
    """Return what every rank of a role is told; `total_steps` counts its optimizer steps."""
    return RankRuntime(
        device=config.trainer.device,
        threads=threads_per_rank(config.trainer),
        seed=config.trainer.seed,
        total_steps=total_steps,
        max_response_length=config.data.max_response_length,
        user_files=tuple(str(Path(file).resolve()) for file in config.algorithm.user_files),
    )


def threads_per_rank(trainer: RunConfig) -> int:
    """Return `trainer.threads_per_worker`, or else the CPUs of a node divided by its ranks."""
    if trainer.threads_per_worker is not None:
        return trainer.threads_per_worker
    # Ranks of a node compute at the same time. With more threads than cores they would wait for
    # each other inside every matrix product.
    cpus = trainer.num_cpus or len(os.sched_getaffinity(0))
    return max(1, cpus // trainer.n_gpus_per_node)
