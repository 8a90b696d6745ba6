"""Check the settings of a rollout of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from quadriga.config.describe import as_written
from quadriga.config.role_ranks import RolePool
from quadriga.config.schema import ReplicasConfig, RolloutConfig
from quadriga.errors import ConfigError

_KEY = "actor_rollout_ref.rollout"


def check_replicas(rollout: RolloutConfig, pools: Sequence[RolePool]) -> None:
    """Check the section `rollout.replicas`. `pools`: of all roles of the run.

    Raises:
        ConfigError: the section is not read, or the rollout cannot consist of replicas.
    """
    replicas, key = rollout.replicas, f"{_KEY}.replicas"
    check_replicas_are_read(replicas, key)
    if not replicas.enable:
        return
    beside = [role for pool in pools if "rollout" in pool.roles for role in pool.roles]
    beside.remove("rollout")
    if beside:
        raise ConfigError(
            f"{key}.enable=true needs ranks on which only the rollout runs, but they are also "
            f"those of {', '.join(beside)}; set placement.rollout and placement.{beside[0]} to "
            "different ranks, or enable=false",
            key=f"{key}.enable",
        )
    if rollout.weight_transport == "collective":
        raise ConfigError(
            f"{_KEY}.weight_transport=collective joins all ranks of the rollout in one process "
            "group, which ends with the first replica that is lost; set weight_transport=auto, or "
            f"{key}.enable=false",
            key=f"{_KEY}.weight_transport",
        )


def check_replicas_are_read(replicas: ReplicasConfig, key: str) -> None:
    """Raise `ConfigError` for a setting of replicas if there are none. `key`: of the section."""
    if replicas.enable:
        return
    plain = ReplicasConfig()
    for name in (f.name for f in fields(replicas)):
        value = getattr(replicas, name)
        if value != getattr(plain, name):
            raise ConfigError(
                f"{key}.{name}={as_written(value)} is not read without replicas; set "
                f"{key}.enable=true, or remove it",
                key=f"{key}.{name}",
            )
