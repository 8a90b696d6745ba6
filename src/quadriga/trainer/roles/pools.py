"""The pools of a run, and which roles share the processes of each pool.

The pools of a program stand in place of the section `placement` of the settings. Example:
{"policy": [2, 2], "critic": [1, 1]}, two nodes of three ranks:

    role       ranks      placement
    actor      0 1 3 4    policy: 2 ranks on each node
    critic     2 5        critic: 1 rank on each node
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from quadriga.config.role_ranks import role_pools
from quadriga.config.schema import RunConfig, TrainConfig
from quadriga.errors import ConfigError, UnknownNameError
from quadriga.single_controller import Backend
from quadriga.trainer.roles.needed import CRITIC, REWARD_MODEL, uses_of_run
from quadriga.trainer.roles.placement import ResourcePoolManager, Role
from quadriga.trainer.roles.registry import added_roles

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


def pool_manager(config: TrainConfig, backend: Backend | None) -> ResourcePoolManager:
    """Return the pools that the section `placement` of the settings describes.

    `backend`: that makes the pools; None if they are only read.

    Raises:
        ConfigError: the section is invalid.
    """
    pools = role_pools(config, uses_of_run(config))
    return ResourcePoolManager(
        resource_pool_spec={pool.name: list(pool.ranks_per_node) for pool in pools},
        mapping={_roles_of_use(config)[use][0]: pool.name for pool in pools for use in pool.roles},
        backend=backend,
        pool_options=pool_options(config.trainer),
    )


def pool_options(trainer: RunConfig) -> dict[str, object]:
    """Return the arguments of `Backend.resource_pool` that the settings give."""
    return {"use_gpu": use_gpu(trainer.device), "max_colocate_count": 1}


def use_gpu(device: str) -> bool | None:
    """Return whether each rank needs an accelerator. None: if the cluster has any.

    `device`: a value of `trainer.device`.
    """
    return None if device == "auto" else device != "cpu"


def uses_by_pool(config: TrainConfig, manager: ResourcePoolManager) -> dict[str, list[str]]:
    """Return pool name → the uses that its processes have.

    Raises:
        ConfigError: KL over the vocabulary needs actor and reference on one pool.
        UnknownNameError: a use is mapped to no pool.
    """
    roles = _roles_of_use(config)
    pool_of = {use: _pool_of_use(roles[use], manager) for use in uses_of_run(config)}
    if config.actor_rollout_ref.actor.reads_full_kl and pool_of["ref"] != pool_of["actor"]:
        raise ConfigError(
            "actor_rollout_ref.actor.kl_loss_type=full needs the logits of policy and reference in "
            f"one process, but role {Role.RefPolicy} is mapped to pool {pool_of['ref']!r} and the "
            f"policy to {pool_of['actor']!r}; map both roles to one pool, or set kl_loss_type=k3",
            key="actor_rollout_ref.actor.kl_loss_type",
        )
    if config.actor_rollout_ref.rollout.take_turns and pool_of["actor"] != pool_of["rollout"]:
        raise ConfigError(
            "actor_rollout_ref.rollout.take_turns=true is for actor and rollout in one process, "
            f"but their pools are {pool_of['actor']!r} and {pool_of['rollout']!r}; set it to false",
            key="actor_rollout_ref.rollout.take_turns",
        )
    pools: dict[str, list[str]] = {}
    for use, pool in pool_of.items():
        pools.setdefault(pool, []).append(use)
    return pools


def _roles_of_use(config: TrainConfig) -> dict[str, tuple[Role, ...]]:
    """Return `ROLES_OF_USE` with the added roles of the run."""
    return ROLES_OF_USE | {added.key: (added.role,) for added in added_roles(config)}


def _pool_of_use(roles: Sequence[Role], manager: ResourcePoolManager) -> str:
    for role in roles:
        if role in manager.mapping:
            return manager.pool_name(role)
    mapped = [str(role) for role in manager.mapping]
    expected = " or ".join(str(role) for role in roles)
    raise UnknownNameError(
        f"the run needs role {expected}, which is mapped to no pool; mapped roles: {mapped}",
        name=roles[0].key,
        known=mapped,
    )


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
        ConfigError: a pool has no ranks, or roles are on pools where they cannot be.
        UnknownNameError: a role is mapped to no pool.
    """
    uses = uses_by_pool(config, manager)
    spec = {pool: list(manager.resource_pool_spec[pool]) for pool in uses}
    for pool, counts in spec.items():
        if not sum(counts):
            raise ConfigError(f"pool {pool!r} has no ranks: resource_pool_spec gives {counts}")
    nodes = _nodes(spec)
    ranks = _ranks(spec, nodes)
    return dataclasses.replace(
        config,
        placement=dataclasses.replace(
            config.placement, **{use: ranks[pool] for pool, own in uses.items() for use in own}
        ),
        trainer=dataclasses.replace(config.trainer, nnodes=len(nodes), n_gpus_per_node=max(nodes)),
    )


def check_settings_of_pools(
    config: TrainConfig,
    manager: ResourcePoolManager,
    check: Callable[[TrainConfig], None],
) -> TrainConfig:
    """Return `settings_of_pools`, after `check` of them.

    Raises:
        InputError: names the first setting that does not fit, and the pools.
    """
    placed = settings_of_pools(config, manager)
    try:
        check(placed)
    except ConfigError as error:
        raise _with_pools(error, config, manager) from None
    return placed


def _nodes(spec: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the number of ranks on each node; one node if the numbers differ."""
    size = max(len(counts) for counts in spec.values())
    nodes = [sum(counts[node] for counts in spec.values() if node < len(counts))
             for node in range(size)]  # fmt: skip
    return nodes if len(set(nodes)) == 1 else [sum(nodes)]


def _ranks(spec: Mapping[str, Sequence[int]], nodes: Sequence[int]) -> dict[str, list[int | str]]:
    """Return the ranks of each pool, numbered node by node."""
    free = [sum(nodes[:node]) for node in range(len(nodes))]  # the next rank of each node
    ranks: dict[str, list[int | str]] = {pool: [] for pool in spec}
    for pool, counts in spec.items():
        for node, count in enumerate(counts if len(nodes) > 1 else [sum(counts)]):
            ranks[pool] += range(free[node], free[node] + count)
            free[node] += count
    return ranks


def _with_pools(
    error: ConfigError, config: TrainConfig, manager: ResourcePoolManager
) -> ConfigError:
    """Return an error that names ranks of `placement`, with the pools that it stands for."""
    if "(placement." not in str(error):
        return error
    pools = [
        f"pool {pool!r} has {sum(manager.resource_pool_spec[pool])} ranks for {', '.join(uses)}"
        for pool, uses in uses_by_pool(config, manager).items()
    ]
    text = f"{error}; placement is that of resource_pool_manager: {'; '.join(pools)}"
    return type(error)(text, **vars(error))
