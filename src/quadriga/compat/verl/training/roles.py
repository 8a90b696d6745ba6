"""The roles and pools that a program written for verl gives to a trainer.

verl starts only the roles that its trainer knows, and does not tell about others. Here a role of
the program takes part in the run if `register_role` has said which stage calls it; any other one is
an error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from quadriga.compat.verl.controller.pools import ResourcePoolManager
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError
from quadriga.single_controller import Worker
from quadriga.single_controller.worker import plain_class
from quadriga.trainer.roles.placement import ResourcePoolManager as QuadrigaPools
from quadriga.trainer.roles.placement import Role
from quadriga.trainer.roles.pools import use_gpu, uses_by_pool
from quadriga.trainer.roles.registry import added_roles, is_built_in

_POLICY = (Role.ActorRolloutRef, Role.ActorRollout, Role.Actor)


def worker_classes(mapping: Mapping[Role, object]) -> dict[Role, type[Worker]]:
    """Return the worker class of each role, also for the results of `ray.remote`."""
    return {role: plain_class(cls) for role, cls in mapping.items()}


def check_called(roles: Iterable[Role], config: TrainConfig, where: str) -> None:
    """Check that a stage calls each role that a program has added to a trainer.

    Args:
        roles: the roles that have a worker class or a pool.
        config: the settings, with the added roles of the run.
        where: the name of the mapping, for the message.

    Raises:
        ConfigError: names the role, and what to write.
    """
    known = {added.role for added in added_roles(config)}
    for role in roles:
        if not isinstance(role, Role):
            raise ConfigError(
                f"{where} has the key {role!r}, expected a role: Role.Critic, or the result of "
                "Role.add('Judge')"
            )
        if not is_built_in(role) and role not in known:
            raise ConfigError(
                f"{where} has role {role}, but no stage of a step calls it. Register it before the "
                f"run: register_role(Role.{role.name}, worker=…, stages=[RoleStage('method', "
                "reads=(…), writes=(…), after='score_responses')]) of quadriga.trainer.roles; "
                "docs/concepts/roles.md has a program"
            )


def check_stages(config: TrainConfig) -> None:
    """Check that the added roles of a run have stages. Raises `ConfigError` for one without."""
    for added in added_roles(config):
        if not added.stages:
            raise ConfigError(
                f"role {added.key} is registered without stages, so nothing would call it in a "
                f"step; pass stages=[RoleStage(…)] to register_role(Role.{added.role.name}, …)"
            )


def pools_of(
    manager: ResourcePoolManager[Role] | QuadrigaPools | None, config: TrainConfig, device: str
) -> QuadrigaPools | None:
    """Return the pools of the run, from those of a program. None: those of the settings.

    An added role that is mapped to no pool shares the pool of the policy. A pool of verl's manager
    that no role of the run uses is left out, and stderr names it.
    """
    if not isinstance(manager, ResourcePoolManager):
        return manager
    mapping = dict(manager.mapping)
    shared = next((mapping[role] for role in _POLICY if role in mapping), None)
    if shared is not None:
        mapping = {added.role: shared for added in added_roles(config)} | mapping
    options: dict[str, object] = {
        "use_gpu": use_gpu(device),
        "max_colocate_count": manager.max_colocate_count,
    }

    def pools(spec: Mapping[str, list[int]], roles: Mapping[Role, str]) -> QuadrigaPools:
        return QuadrigaPools(spec, roles, pool_options=options)

    given = pools(manager.resource_pool_spec, mapping)
    used = uses_by_pool(config, given)
    unused = [name for name in manager.resource_pool_spec if name not in used]
    if not unused:
        return given
    print(
        f"pools without a role of this run, which are not created: {', '.join(unused)}",
        file=sys.stderr,
    )
    return pools(
        {name: ranks for name, ranks in manager.resource_pool_spec.items() if name in used},
        {role: name for role, name in mapping.items() if name in used},
    )
