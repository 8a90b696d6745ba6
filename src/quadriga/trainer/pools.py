"""The pools of a program, in place of the section `placement` of the settings.

Example: {"policy": [2, 2], "critic": [1, 1]}, two nodes of three ranks:

    role       ranks      placement
    actor      0 1 3 4    policy: 2 ranks on each node
    critic     2 5        critic: 1 rank on each node
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError
from quadriga.trainer.preflight import check_settings
from quadriga.trainer.role_workers import uses_by_pool
from quadriga.trainer.roles.placement import ResourcePoolManager


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
    check: Callable[[TrainConfig], None] = check_settings,
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
