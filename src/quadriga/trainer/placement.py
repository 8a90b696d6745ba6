"""Which roles there are, and which pool of processes each runs on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from quadriga.errors import ConfigError, UnknownNameError


@dataclass(frozen=True)
class Role:
    """What a worker is for. The set is open: `Role.add("Judge")` makes `Role.Judge`.

    `key` is the role's name in settings, groups and messages (`actor_rollout_ref`).
    """

    name: str
    key: str

    Actor: ClassVar[Role]
    Rollout: ClassVar[Role]
    ActorRollout: ClassVar[Role]
    Critic: ClassVar[Role]
    RefPolicy: ClassVar[Role]
    RewardModel: ClassVar[Role]
    ActorRolloutRef: ClassVar[Role]

    @classmethod
    def add(cls, name: str, key: str | None = None) -> Role:
        """Make the role `Role.<name>`; asking again for the same role gives the same one.

        Raises:
            ConfigError: the name is taken by another key, or is no identifier.
        """
        role = cls(name, key if key is not None else _snake_case(name))
        known = _ROLES.get(name)
        if known is None and (not name.isidentifier() or hasattr(cls, name)):
            raise ConfigError(
                f"a role's name must be a free identifier, got {name!r}; choose another name"
            )
        if known is not None and known != role:
            raise ConfigError(f"role {name} exists with key {known.key!r}, not {role.key!r}")
        _ROLES[name] = role
        setattr(cls, name, role)
        return role

    @classmethod
    def all(cls) -> Iterator[Role]:
        """Every role, in the order in which they were added."""
        return iter(tuple(_ROLES.values()))

    def __str__(self) -> str:
        return self.key


def _snake_case(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(name))


_ROLES: dict[str, Role] = {}
for _name, _key in {
    "Actor": "actor",
    "Rollout": "rollout",
    "ActorRollout": "actor_rollout",
    "Critic": "critic",
    "RefPolicy": "ref",
    "RewardModel": "reward_model",
    "ActorRolloutRef": "actor_rollout_ref",
}.items():
    Role.add(_name, _key)


@dataclass
class ResourcePoolManager:
    """Pools by name, and the pool of each role.

    Args:
        resource_pool_spec: pool name → ranks on each node, `{"global": [8, 8]}`.
        mapping: role → pool name.
        backend: the backend that makes the pools; None: Ray.
    """

    resource_pool_spec: Mapping[str, list[int]]
    mapping: Mapping[Role, str]
    backend: Any = None
    pool_options: Mapping[str, Any] = field(default_factory=dict)
    resource_pool_dict: dict[str, Any] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for role, pool in self.mapping.items():
            if pool not in self.resource_pool_spec:
                raise UnknownNameError(
                    f"role {role} is mapped to pool {pool!r}, but the pools are "
                    f"{sorted(self.resource_pool_spec)}",
                    name=pool,
                    known=sorted(self.resource_pool_spec),
                )

    def create_resource_pool(self) -> None:
        """Make every pool, after checking that the machines can hold all of them together.

        Raises:
            PlacementError: a pool does not fit; names it and what it lacks. Nothing was started.
        """
        backend = self._backend()
        pools = {
            name: backend.resource_pool(list(ranks), name_prefix=name, **self.pool_options)
            for name, ranks in self.resource_pool_spec.items()
        }
        backend.check_placement(list(pools.values()))
        self.resource_pool_dict.update(pools)

    def get_resource_pool(self, role: Role) -> Any:
        """The pool of `role`.

        Raises:
            UnknownNameError: the role has no pool.
        """
        if role not in self.mapping:
            raise UnknownNameError(
                f"role {role} has no pool; mapped roles: {[str(r) for r in self.mapping]}",
                name=str(role),
                known=[str(r) for r in self.mapping],
            )
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Ranks over all pools (on a GPU machine: GPUs)."""
        return sum(sum(ranks) for ranks in self.resource_pool_spec.values())

    def _backend(self) -> Any:
        if self.backend is None:
            from quadriga.backends import get_backend

            self.backend = get_backend("ray")
        return self.backend
