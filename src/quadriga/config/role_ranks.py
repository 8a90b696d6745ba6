"""From the section `placement` of the settings to the pools of the roles.

Example: 2 nodes of 4 ranks, placement.actor=[0-3], placement.critic=[4,5], placement.rollout=[6-7]

    role        ranks      pool             ranks on each node of the pool
    actor       0 1 2 3    actor_ref        [4]
    ref         0 1 2 3    actor_ref
    critic      4 5        critic           [2]
    rollout     6 7        rollout          [2]
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from quadriga.config.commands import RanksConfig
from quadriga.config.schema import EngineConfig, PlacementConfig, TrainConfig, TrainerConfig
from quadriga.errors import ConfigError

REWARD_MODEL = "reward_model"
ROLES = ("actor", "rollout", "ref", "critic", REWARD_MODEL)
"""The built-in roles. `roles_of` also returns those that users have added to a run."""


def with_roles(roles: Mapping[str, type | None]) -> type[TrainConfig]:
    """Return `TrainConfig` with a section, and ranks in `placement`, for each added role.

    `roles`: the key of a role → the dataclass of its section, or None for no section. For
    {"judge": JudgeConfig} the settings `judge.…` and `placement.judge` exist. Equal arguments
    return the same class.
    """
    return _with_roles(tuple(roles.items())) if roles else TrainConfig


@lru_cache(maxsize=64)
def _with_roles(roles: tuple[tuple[str, type | None], ...]) -> type[TrainConfig]:
    placement = dataclasses.make_dataclass(
        "PlacementConfig",
        [(key, list[int | str] | None, dataclasses.field(default=None)) for key, _ in roles],
        bases=(PlacementConfig,),
        frozen=True,
    )
    sections = [(key, cls) for key, cls in roles if cls is not None]
    return dataclasses.make_dataclass(
        "TrainConfig",
        [
            (key, cls, dataclasses.field(default_factory=cls))
            for key, cls in (("placement", placement), *sections)
        ],
        bases=(TrainConfig,),
        frozen=True,
    )


def roles_of(config: TrainConfig) -> tuple[str, ...]:
    """Return the roles that can be placed: `ROLES`, then those that users have added."""
    return tuple(field.name for field in dataclasses.fields(config.placement))


def added_keys(config: TrainConfig) -> tuple[str, ...]:
    """Return the roles that users have added. One of them may be in place of `REWARD_MODEL`."""
    kind = type(config.placement)
    return () if kind is PlacementConfig else tuple(kind.__annotations__)


def has_reward_model(config: TrainConfig) -> bool:
    """Return whether the built-in reward model takes part in the run."""
    return REWARD_MODEL not in added_keys(config) and config.reward_model.enable


@dataclass(frozen=True)
class RolePool:
    """Roles that share processes.

    Attributes:
        roles: the roles, in the order of `roles_of`.
        ranks: the numbers of the ranks, over all nodes, in increasing order.
        ranks_per_node: the number of these ranks on each node that has any.
    """

    roles: tuple[str, ...]
    ranks: tuple[int, ...]
    ranks_per_node: tuple[int, ...]

    @property
    def name(self) -> str:
        """The names of the roles, joined: "actor_rollout"."""
        return "_".join(self.roles)


def role_pools(config: TrainConfig, roles: Sequence[str] | None = None) -> tuple[RolePool, ...]:
    """Return the pools of these roles, by default of all, in the order of their first roles.

    Raises:
        ConfigError: an entry is no rank, two roles share some of their ranks but not all, or a
            rank has no role.
    """
    ranks_of = role_ranks(config)
    if roles is None:
        absent = () if has_reward_model(config) else (REWARD_MODEL,)
        roles = [*(role for role in ROLES if role not in absent), *added_keys(config)]
    pools: dict[tuple[int, ...], list[str]] = {}
    for role in roles:
        pools.setdefault(ranks_of[role], []).append(role)
    _check_disjoint(pools)
    _check_all_used(config, ranks_of, roles)
    per_node = config.trainer.n_gpus_per_node
    return tuple(
        RolePool(tuple(members), ranks, tuple(Counter(r // per_node for r in ranks).values()))
        for ranks, members in pools.items()
    )


def role_ranks(config: TrainConfig) -> Mapping[str, tuple[int, ...]]:
    """Return role → its ranks in increasing order.

    Raises:
        ConfigError: an entry of `placement` is not a rank of the run.
    """
    world = config.trainer.ranks
    given = {role: getattr(config.placement, role) for role in roles_of(config)}
    actor = tuple(range(world))
    if given["actor"] is not None:
        actor = _parse("actor", given["actor"], world)
    return {
        role: actor if entries is None else _parse(role, entries, world)
        for role, entries in given.items()
    }


def num_ranks(config: TrainConfig, role: str) -> int:
    """Return the number of ranks of a role."""
    return len(role_ranks(config)[role])


def base_is_in_actor(config: TrainConfig) -> bool:
    """Return whether the reference is the actor's model with adapters off."""
    ranks = role_ranks(config)
    return config.actor_rollout_ref.model.lora.enabled and ranks["ref"] == ranks["actor"]


def reference_engine(config: TrainConfig) -> tuple[str, EngineConfig]:
    """Return the key and the settings of the engine that computes the reference policy."""
    policy = config.actor_rollout_ref
    if base_is_in_actor(config):
        return "actor_rollout_ref.actor.engine", policy.actor.engine
    return "actor_rollout_ref.ref.engine", policy.ref.engine


def has_replicas(config: TrainConfig) -> bool:
    """Return whether the ranks of the rollout are replicas. Those that generate while the policy is
    trained always are."""
    ranks = role_ranks(config)
    beside = config.trainer.max_staleness > 0 and ranks["rollout"] != ranks["actor"]
    return beside or config.actor_rollout_ref.rollout.replicas.enable


def data_ranks(config: TrainConfig, role: str) -> int:
    """Return the number of data-parallel ranks of a role: each receives equal rows of its own."""
    ranks = num_ranks(config, role)
    policy = config.actor_rollout_ref
    engines = {
        "actor": policy.actor.engine,
        "ref": reference_engine(config)[1],
        "critic": config.critic.engine,
    }
    if role == "rollout" and has_replicas(config):
        return 1  # any number of rows is divided into requests
    if has_reward_model(config):
        engines[REWARD_MODEL] = config.reward_model.engine
    return ranks // engines[role].model_parallel_size if role in engines else ranks


def _parse(role: str, entries: Sequence[int | str], world: int) -> tuple[int, ...]:
    ranks = [rank for entry in entries for rank in _entry(role, entry)]
    if not ranks:
        raise _wrong(role, "must name at least one rank")
    if beyond := [rank for rank in ranks if rank >= world]:
        raise _wrong(
            role,
            f"names rank {beyond[0]}, but the run has ranks 0 to {world - 1} "
            "(trainer.nnodes × trainer.n_gpus_per_node)",
        )
    if len(set(ranks)) < len(ranks):
        twice = next(rank for rank in ranks if ranks.count(rank) > 1)
        raise _wrong(role, f"names rank {twice} twice")
    return tuple(sorted(ranks))


def _entry(role: str, entry: int | str) -> range:
    first, dash, last = str(entry).partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise _wrong(role, f"has the entry {entry!r}; expected a rank such as 3 or a range, 0-3")
    if dash and int(last) < int(first):
        raise _wrong(role, f"has the entry {entry!r}, whose end is before its start")
    return range(int(first), int(last if dash else first) + 1)


def _check_disjoint(pools: Mapping[tuple[int, ...], Sequence[str]]) -> None:
    owner: dict[int, str] = {}
    for ranks, roles in pools.items():
        for rank in ranks:
            if rank in owner:
                raise _wrong(
                    roles[0],
                    f"and placement.{owner[rank]} both name rank {rank}, but not the same ranks; "
                    "give both roles equal ranks, then they share processes, or separate ones",
                )
            owner[rank] = roles[0]


def _check_all_used(
    config: TrainConfig, ranks_of: Mapping[str, tuple[int, ...]], roles: Sequence[str]
) -> None:
    world, used = config.trainer.ranks, {rank for role in roles for rank in ranks_of[role]}
    if left := [rank for rank in range(world) if rank not in used]:
        raise ConfigError(
            f"no role uses rank {left[0]} of the {world} ranks (trainer.nnodes × "
            f"trainer.n_gpus_per_node); roles of this run: {', '.join(roles)}. Give the rank to a "
            "role in the section placement, or lower the number of ranks",
            key="placement",
        )


def _wrong(role: str, problem: str) -> ConfigError:
    return ConfigError(f"placement.{role} {problem}", key=f"placement.{role}")


def trainer_settings(ranks: RanksConfig) -> TrainerConfig:
    """Return the settings of the same ranks as `quadriga train` has them."""
    values = {field.name: getattr(ranks, field.name) for field in dataclasses.fields(ranks)}
    if ranks.backend == "auto":
        values["backend"] = "local" if ranks.ranks == 1 else "ray"
    return TrainerConfig(**values)
