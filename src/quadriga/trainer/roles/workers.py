"""The workers of a run: which roles it needs, in which pools, with which class and arguments, and
the order in which they load their models.

Example: actor and reference on one pool, rollout and critic on pools of their own:

    pool       worker key   worker
    a          actor_ref    ActorRolloutRefWorker(role="actor_ref")
    b          rollout      ActorRolloutRefWorker(role="rollout")
    c          critic       CriticWorker

The pools of a program stand in place of the section `placement` of the settings. Example:
{"policy": [2, 2], "critic": [1, 1]}, two nodes of three ranks:

    role       ranks      placement
    actor      0 1 3 4    policy: 2 ranks on each node
    critic     2 5        critic: 1 rank on each node
"""

import dataclasses
import inspect
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from quadriga.algorithms.advantages import get_advantage
from quadriga.algorithms.policy_losses import get_policy_loss
from quadriga.algorithms.user_files import loaded_files
from quadriga.config.plan import batch_plan, mini_batch_prompts
from quadriga.config.role_ranks import role_pools
from quadriga.config.schema import (
    CorrectionLevel,
    RolloutCorrectionConfig,
    RunConfig,
    TrainConfig,
    UpdateMode,
)
from quadriga.errors import ConfigError
from quadriga.parallel.control_groups import available_cpus
from quadriga.single_controller import Backend, ClassWithInitArgs, Dispatch, Worker, WorkerGroup
from quadriga.single_controller.worker import registered_methods
from quadriga.trainer.roles.needs import (
    CRITIC,
    REWARD_MODEL,
    critic_model,
    needs_critic,
    reads_ref_log_prob,
    uses_of_run,
)
from quadriga.trainer.roles.registry import (
    AddedRole,
    ResourcePoolManager,
    Role,
    added_roles,
    is_built_in,
)
from quadriga.workers.roles import (
    ActorGroup,
    CriticGroup,
    ReceivingGroup,
    RefGroup,
    RewardModelGroup,
    RolloutGroup,
    SendingGroup,
    StagingGroup,
    TurnTakingGroup,
    methods_of,
)
from quadriga.workers.runtime import RankRuntime, SavedWorker

INIT, SAVE, LOAD = "init_model", "save_checkpoint", "load_checkpoint"
_NO_BATCH = (Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL)
"""Dispatch modes whose methods return a list of results in place of one batch."""
POLICY_USES = ("actor", "rollout", "ref")
ROLES_OF_USE: dict[str, tuple[Role, ...]] = {
    "actor": (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef),
    "rollout": (Role.Rollout, Role.ActorRollout, Role.ActorRolloutRef),
    # Without a pool of its own, the reference is in the processes of the actor.
    "ref": (Role.RefPolicy, Role.ActorRolloutRef, Role.Actor, Role.ActorRollout),
    CRITIC: (Role.Critic,),
    REWARD_MODEL: (Role.RewardModel,),
}
"""Use → the roles that stand for it in a `ResourcePoolManager`; the first one that is mapped."""

POLICY_ROLES = frozenset(role for use in POLICY_USES for role in ROLES_OF_USE[use])
"""The roles whose workers load the model of the policy."""


# What a run computes.


def takes_old_log_probs_from_update(config: TrainConfig) -> bool:
    """Return whether the update computes the old log-probabilities itself.

    If a step is one optimizer step, they equal the log-probabilities of the update without their
    gradient. A pass of their own is needed if a stage
    reads them before the update, if the actor is not updated in every step, or if adapters drop
    inputs in an update, because responses were sampled without dropout.
    """
    chosen = config.actor_rollout_ref.actor.old_log_probs_from_update
    if chosen is not None:
        return chosen
    one_step = batch_plan(config).actor.optimizer_steps == 1
    drops = config.actor_rollout_ref.model.lora.dropout > 0
    read_earlier = reads_old_log_probs(config) or selects_tokens(config)
    return one_step and not read_earlier and not drops and not config.critic.warmup_steps


def reads_old_log_probs(config: TrainConfig) -> bool:
    """Return whether the reward, the estimator or a correction by weights with a mean over the
    batch reads the log-probabilities before the update."""
    estimator = get_advantage(config.algorithm.adv_estimator)
    in_reward = config.algorithm.use_kl_in_reward
    return in_reward or normalises_weights(config) or "old_log_prob_BT" in estimator.needs


def normalises_weights(config: TrainConfig) -> bool:
    """Return whether importance weights are divided by their mean over the batch."""
    return corrects_mismatch(config) and config.algorithm.rollout_correction.normalise


def corrects_mismatch(config: TrainConfig) -> bool:
    """Return whether importance weights correct the mismatch of rollout and training."""
    return correction_of(config).level != "none"


def correction_of(config: TrainConfig) -> RolloutCorrectionConfig:
    """Return the importance correction. By default old responses have one, and others have none.
    A loss that reads the log-probabilities of the rollout has weights of its own."""
    correction = config.algorithm.rollout_correction
    loss = get_policy_loss(config.actor_rollout_ref.actor.policy_loss.name)
    weighs = config.trainer.max_staleness and "rollout_log_prob_BT" not in loss.needs
    default: CorrectionLevel = "token" if weighs else "none"
    return dataclasses.replace(correction, level=correction.level or default)


def selects_tokens(config: TrainConfig) -> bool:
    """Return whether the policy loss chooses tokens over the whole batch."""
    loss = get_policy_loss(config.actor_rollout_ref.actor.policy_loss.name)
    return loss.select is not None


# Pools.


def pool_manager(config: TrainConfig, backend: Backend | None) -> ResourcePoolManager:
    """Return the pools that the section `placement` of the settings describes.

    `backend`: that makes the pools; None if they are only read.

    Raises:
        ConfigError: the section is invalid.
    """
    pools, roles = role_pools(config, uses_of_run(config)), _roles_of_use(config)
    return ResourcePoolManager(
        resource_pool_spec={pool.name: list(pool.ranks_per_node) for pool in pools},
        mapping={roles[use][0]: pool.name for pool in pools for use in pool.roles},
        backend=backend,
        pool_options={"use_gpu": use_gpu(config.trainer.device), "max_colocate_count": 1},
    )


def use_gpu(device: str) -> bool | None:
    """Return whether each rank needs an accelerator. None: if the cluster has any.

    `device`: a value of `trainer.device`.
    """
    return None if device == "auto" else device != "cpu"


def uses_by_pool(config: TrainConfig, manager: ResourcePoolManager) -> dict[str, list[str]]:
    """Return pool name → the uses that its processes have.

    Raises:
        UnknownNameError: a use is mapped to no pool.
    """
    roles, pools = _roles_of_use(config), dict[str, list[str]]()
    for use in uses_of_run(config):
        pools.setdefault(manager.pool_name(*roles[use]), []).append(use)
    return pools


def _roles_of_use(config: TrainConfig) -> dict[str, tuple[Role, ...]]:
    """Return `ROLES_OF_USE` with the added roles of the run."""
    return ROLES_OF_USE | {added.key: (added.role,) for added in added_roles(config)}


def worker_keys(uses: Sequence[str]) -> dict[str, list[str]]:
    """Return worker key → its uses, for one pool.

    One worker has all uses of the policy, so that they share weights. Every other role is a worker
    of its own.
    """
    policy = [use for use in uses if use in POLICY_USES]
    keys = {"_".join(policy): policy} if policy else {}
    return keys | {use: [use] for use in uses if use not in POLICY_USES}


def workers_of(pools: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return worker key → its uses, over all pools."""
    return {key: own for uses in pools.values() for key, own in worker_keys(uses).items()}


def settings_of_pools(config: TrainConfig, manager: ResourcePoolManager) -> TrainConfig:
    """Return the settings with the nodes and the placement that the pools of a program describe.

    Nodes with different numbers of ranks, which the settings cannot describe, count as one node.

    Raises:
        ConfigError: a pool has no ranks.
        UnknownNameError: a role is mapped to no pool.
    """
    uses = uses_by_pool(config, manager)
    spec = {pool: list(manager.resource_pool_spec[pool]) for pool in uses}
    for pool, counts in spec.items():
        if not sum(counts):
            raise ConfigError(f"pool {pool!r} has no ranks: resource_pool_spec gives {counts}")
    size = max(map(len, spec.values()))
    nodes = [sum(c[node] for c in spec.values() if node < len(c)) for node in range(size)]
    if len(set(nodes)) > 1:
        nodes, spec = [sum(nodes)], {pool: [sum(counts)] for pool, counts in spec.items()}
    free = [sum(nodes[:node]) for node in range(len(nodes))]  # the next rank of each node
    ranks: dict[str, list[int | str]] = {pool: [] for pool in spec}
    for pool, counts in spec.items():
        for node, count in enumerate(counts):
            ranks[pool] += range(free[node], free[node] + count)
            free[node] += count
    placement = {use: ranks[pool] for pool, own in uses.items() for use in own}
    return dataclasses.replace(
        config,
        placement=dataclasses.replace(config.placement, **placement),
        trainer=dataclasses.replace(config.trainer, nnodes=len(nodes), n_gpus_per_node=nodes[0]),
    )


_ORDER = (CRITIC, "ref", REWARD_MODEL, "", "rollout", "actor")
"""The uses in the order without declarations; "" stands for the other roles of users."""
_USES: dict[Role, tuple[str, ...]] = {
    Role.ActorRollout: ("actor", "rollout"),
    Role.ActorRolloutRef: ("actor", "rollout", "ref"),
}


def start_order(workers: Mapping[str, Sequence[str]], added: Sequence[AddedRole]) -> list[str]:
    """Return the keys of the workers in the order in which they load their models.

    Without declarations: critic, reference, reward model, added roles, a rollout in other
    processes, and the actor last, because then the memory that the others need is known. A worker
    with several uses has the place of its last one. Of the workers whose predecessors have started,
    the first one in this order is next:

        roles       critic, actor_rollout, judge (starts_before critic), mirror (starts_after actor)
        order       judge, critic, actor_rollout, mirror

    Args:
        workers: worker key → its uses.
        added: the added roles of the run.

    Raises:
        ConfigError: the declarations have a cycle, or name a role that is not registered.
    """

    def rank(key: str) -> int:
        return max(_ORDER.index(use if use in _ORDER else "") for use in workers[key])

    sorter = TopologicalSorter(_earlier_workers(workers, added))
    try:
        sorter.prepare()
    except CycleError as error:
        raise ConfigError(
            f"the start order of the roles has a cycle: {' before '.join(error.args[1])}; change "
            "starts_after or starts_before of one of them"
        ) from None
    ready, order = list[str](), list[str]()
    while sorter.is_active():
        ready += sorter.get_ready()
        ready.sort(key=sorted(workers, key=rank).index)
        order.append(ready.pop(0))
        sorter.done(order[-1])
    return order


def _earlier_workers(
    workers: Mapping[str, Sequence[str]], added: Sequence[AddedRole]
) -> dict[str, set[str]]:
    """Return worker key → the workers that must load their models before it."""
    known = {role.role for role in added}
    earlier: dict[str, set[str]] = {key: set() for key in workers}
    for role in added:
        declared = [(other, True) for other in role.starts_after]
        declared += [(other, False) for other in role.starts_before]
        for other, is_first in declared:
            if not is_built_in(other) and other != Role.RewardModel and other not in known:
                raise ConfigError(
                    f"role {role.key} is to start before or after role {other}, which is not part "
                    "of the run; register it with register_role, or name another role"
                )
            uses = set(_USES.get(other, (other.key,)))
            for key in (key for key, its in workers.items() if uses & set(its)):
                first, second = (key, role.key) if is_first else (role.key, key)
                earlier[second].add(first)
    return earlier


# Worker classes.


def check_roles(
    config: TrainConfig, mapping: Mapping[Role, type[Worker]], manager: ResourcePoolManager | None
) -> None:
    """Check the added roles before any process starts: classes, pools and start order.

    Args:
        mapping: role → a class in place of the built-in or registered one.
        manager: the pools of a program; None: those of the settings.

    Raises:
        ConfigError: a class, a pool or the start order does not fit.
    """
    added = added_roles(config)
    known = {role.role for role in added} | {Role.RewardModel}
    pooled = () if manager is None else manager.mapping
    for name, roles in (("role_worker_mapping", mapping),
                        ("the mapping of resource_pool_manager", pooled)):  # fmt: skip
        for role in roles:
            if not is_built_in(role) and role not in known:
                raise ConfigError(
                    f"{name} has role {role}, which the trainer does not call; register it with "
                    "register_role and load the settings with load_train_config"
                )
    for one in added:
        worker_of(one, config, mapping, RankRuntime())
    if config.trainer.snapshot_freq:
        own = {one.key: one.worker for one in added if one.worker is not None}
        for key, cls in (own | {role.key: cls for role, cls in mapping.items()}).items():
            _check_copied(key, cls)
    if added:
        pools = uses_by_pool(config, manager or pool_manager(config, None))
        start_order(workers_of(pools), added)


def _check_copied(key: str, cls: type[Worker]) -> None:
    """Check that a snapshot has the whole state that the workers of a role save."""
    if SAVE in registered_methods(cls) and getattr(cls, SAVE) is not SavedWorker.save_checkpoint:
        raise ConfigError(
            f"role {key}: {cls.__name__} has a {SAVE} of its own, whose state no snapshot has; set "
            "trainer.snapshot_freq=0",
            key="trainer.snapshot_freq",
        )


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
        cls = _worker_class(key, uses, mapping, config.actor_rollout_ref.rollout.update)
        _check_methods(key, cls, methods_of(_protocols(config, uses, apart)))
        if key == CRITIC:
            arguments, steps = _critic_arguments(config), critic_steps
        elif key == REWARD_MODEL:
            arguments, steps = _reward_model_arguments(config), total_steps
        else:
            arguments, steps = _policy_arguments(config, key), actor_steps
        classes[key] = ClassWithInitArgs(cls, **arguments, runtime=rank_runtime(config, steps))
    return classes


def _policy_arguments(config: TrainConfig, key: str) -> dict[str, object]:
    settings = config.actor_rollout_ref
    mini_batch, _ = mini_batch_prompts(config)
    actor = dataclasses.replace(settings.actor, ppo_mini_batch_size=mini_batch)
    rollout = settings.rollout
    if config.trainer.replay_order:  # the same tensors elsewhere in memory can round otherwise
        rollout = dataclasses.replace(rollout, share_weights=False)
    return {"config": dataclasses.replace(settings, actor=actor, rollout=rollout), "role": key}


def _critic_arguments(config: TrainConfig) -> dict[str, object]:
    policy, critic = config.actor_rollout_ref, config.critic
    _, mini_batch = mini_batch_prompts(config)
    settings = dataclasses.replace(
        critic,
        model=critic_model(config),
        ppo_mini_batch_size=mini_batch,
        ppo_epochs=critic.ppo_epochs or policy.actor.ppo_epochs,
    )
    return {"config": settings, "responses_per_prompt": policy.rollout.n}


def _reward_model_arguments(config: TrainConfig) -> dict[str, object]:
    return {
        "config": config.reward_model,
        "policy": config.actor_rollout_ref.model.frozen(),
        "policy_arguments": config.data.chat_template_kwargs,
    }


def _worker_class(
    key: str, uses: Sequence[str], mapping: Mapping[Role, type[Worker]], update: UpdateMode
) -> type[Worker]:
    """Return the class of the role with this key, else of a role that contains the uses."""
    from quadriga.workers import ActorRolloutRefWorker, CriticWorker, RewardModelWorker
    from quadriga.workers.actor_rollout_ref import InFlightWorker

    exact = [role for role in mapping if role.key == key]
    roles = [*exact, *(role for use in uses for role in ROLES_OF_USE[use])]
    built_in: dict[str, type[Worker]] = {CRITIC: CriticWorker, REWARD_MODEL: RewardModelWorker}
    if update == "in_flight":
        built_in["rollout"] = InFlightWorker
    default = built_in.get(key, ActorRolloutRefWorker)
    return next((mapping[role] for role in roles if role in mapping), default)


def _protocols(config: TrainConfig, uses: Sequence[str], apart: bool) -> list[type]:
    """Return the protocols of the methods that the trainer calls on a worker with these uses."""
    turns = config.actor_rollout_ref.rollout.take_turns
    in_flight = config.actor_rollout_ref.rollout.update == "in_flight"
    needed: dict[str, list[tuple[type, bool]]] = {
        "actor": [(ActorGroup, True), (SendingGroup, apart), (TurnTakingGroup, turns)],
        "rollout": [(RolloutGroup, True), (ReceivingGroup, apart), (StagingGroup, in_flight)],
        "ref": [(RefGroup, reads_ref_log_prob(config))],
        CRITIC: [(CriticGroup, True)],
        REWARD_MODEL: [(RewardModelGroup, True)],
    }
    return [protocol for use in uses for protocol, is_called in needed[use] if is_called]


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


def rank_runtime(config: TrainConfig, total_steps: int) -> RankRuntime:
    """Return what every rank of a role is told; `total_steps` counts its optimizer steps."""
    return RankRuntime(
        device=config.trainer.device, threads=threads_per_rank(config.trainer),
        seed=config.trainer.seed, total_steps=total_steps,
        max_response_length=config.data.max_response_length, correction=correction_of(config),
        warmup_steps=config.critic.warmup_steps if needs_critic(config) else 0,
        user_files=loaded_files(config.algorithm.user_files),
    )  # fmt: skip


def threads_per_rank(trainer: RunConfig) -> int:
    """Return `trainer.threads_per_worker`, or else the CPUs of a node divided by its ranks."""
    if trainer.threads_per_worker is not None:
        return trainer.threads_per_worker
    # Ranks of a node compute at the same time. With more threads than cores they would wait for
    # each other inside every matrix product.
    cpus = trainer.num_cpus or available_cpus()
    return max(1, cpus // trainer.n_gpus_per_node)


def _check_methods(key: str, cls: type[Worker], called: Iterable[str]) -> None:
    """Check that the worker class of a role has the methods that the trainer calls."""
    methods = registered_methods(cls)
    if missing := [name for name in called if name not in methods]:
        raise ConfigError(
            f"role {key}: the trainer calls {', '.join(missing)}, but {cls.__name__} has no such "
            "registered method; define it and mark it with @register"
        )


# Added roles.


def worker_of(
    added: AddedRole,
    config: TrainConfig,
    mapping: Mapping[Role, type[Worker]],
    runtime: RankRuntime,
) -> ClassWithInitArgs:
    """Return the worker class of an added role with its arguments, after all checks of it.

    Args:
        mapping: role → a class in place of the registered one.
        runtime: what every rank of the role is told about the run.

    Raises:
        ConfigError: the role has no class, or the class lacks a method or a parameter.
    """
    cls, key = mapping.get(added.role, added.worker), added.key
    if cls is None:
        raise ConfigError(
            f"role {key} has no worker class; pass worker=… to register_role, or "
            "role_worker_mapping"
        )
    methods = registered_methods(cls)
    called = [stage.method for stage in added.stages]
    if (SAVE in methods) != (LOAD in methods):
        called += [SAVE, LOAD]  # a checkpoint needs both
    _check_methods(key, cls, called)
    for name in called:
        mode = Dispatch.members.get(methods[name].dispatch_mode.name, methods[name].dispatch_mode)
        if mode in _NO_BATCH and not methods[name].execute_mode.single:
            raise ConfigError(
                f"role {key}: {cls.__name__}.{name} has dispatch mode {mode.name}, which splits no "
                "batch; use Dispatch.DP_COMPUTE_PROTO"
            )
    given: dict[str, object] = {"runtime": runtime}
    if added.settings is not None:
        given["config"] = getattr(config, key)
    parameters = inspect.signature(cls).parameters
    arguments = {name: value for name, value in given.items() if name in parameters}
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"role {key}: the constructor of {cls.__name__} is given {' and '.join(given)}: {error}"
        ) from None
    return ClassWithInitArgs(cls, **arguments)


def has_method(group: WorkerGroup, role: str, name: str) -> bool:
    """Return whether the workers of a role have a registered method."""
    return name in registered_methods(group.class_of(role))


def saving_roles(added: Iterable[AddedRole]) -> list[str]:
    """Return the keys of the roles whose registered classes have a state."""
    classes = ((role.key, role.worker) for role in added)
    return [key for key, cls in classes if cls is not None and SAVE in registered_methods(cls)]
