"""The roles, and the pool of processes on which each role runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from quadriga.config.schema import Options
from quadriga.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from quadriga.single_controller import Backend, ResourcePool


# A registry beside the class attributes, because `Role.all` must also list roles of users, in the
# order in which they were added.
_ROLES: dict[str, Role] = {}


class _RoleType(type):
    """The class of `Role`, for the error of a name that it does not have."""

    if not TYPE_CHECKING:  # a type checker reports such a name itself

        def __getattr__(cls, name: str) -> object:
            raise AttributeError(
                f"Role has no {name!r}; it has {', '.join(_ROLES)}. Role.add({name!r}) adds a "
                "role, Role.all() lists all of them",
                name=name,
                obj=cls,
            )


@dataclass(frozen=True)
class Role(metaclass=_RoleType):
    """What a worker is for. Users can add roles: `Role.add("Judge")` makes `Role.Judge`.

    Attributes:
        name: the attribute of `Role`, `ActorRolloutRef`.
        key: the name in settings, worker groups and messages, `actor_rollout_ref`.
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
        """Add the role `Role.<name>` and return it. A role that exists already is returned.

        Args:
            name: an identifier that is not an attribute of `Role` yet.
            key: its key; None: `name` in snake case.

        Raises:
            ConfigError: the role exists with another key, or `name` cannot be used.
        """
        role = cls(name, key if key is not None else _snake_case(name))
        known = _ROLES.get(name)
        if known is None and (not name.isidentifier() or hasattr(cls, name)):
            raise ConfigError(
                f"the name of a role must be an identifier that Role does not use yet, got "
                f"{name!r}; choose another name"
            )
        if known is not None and known != role:
            raise ConfigError(
                f"role {name} exists with key {known.key!r} and cannot get key {role.key!r}"
            )
        _ROLES[name] = role
        setattr(cls, name, role)
        return role

    @classmethod
    def from_string(cls, text: str) -> Role:
        """Return the role with this key, also in upper case; "rm" is verl's `RewardModel`.

        Raises:
            ConfigError: there is no such role.
        """
        keys = {role.key: role for role in cls.all()}
        known = {"rm": cls.RewardModel, **keys}
        for key in (str(text), str(text).lower()):
            if key in known:
                return known[key]
        raise ConfigError(
            f"there is no role {text!r}; roles: {', '.join(keys)}. Role.add adds one",
            key=str(text),
        )

    @classmethod
    def all(cls) -> Iterator[Role]:
        """Return every role, in the order in which they were added."""
        return iter(tuple(_ROLES.values()))

    def __str__(self) -> str:
        return self.key


def _snake_case(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(name))


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
        resource_pool_spec: pool name → number of ranks on each node, `{"global": [8, 8]}`.
        mapping: role → pool name.
        backend: the backend that makes the pools; None: that of the run, which releases them at
            its end, or Ray if a program makes them itself.
        pool_options: keyword arguments of `Backend.resource_pool`, the same for all pools.

    Raises:
        UnknownNameError: a role is mapped to a pool that `resource_pool_spec` does not name.
    """

    resource_pool_spec: Mapping[str, list[int]]
    mapping: Mapping[Role, str]
    backend: Backend | None = None
    pool_options: Options = field(default_factory=dict)
    resource_pool_dict: dict[str, ResourcePool] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for role, pool in self.mapping.items():
            if pool not in self.resource_pool_spec:
                known = sorted(self.resource_pool_spec)
                text = f"role {role} is mapped to pool {pool!r}, but the pools are {known}"
                raise UnknownNameError(text, name=pool, known=known)

    def create_resource_pool(self, backend: Backend | None = None) -> None:
        """Make every pool, after a check that the nodes can hold all of them together.

        Args:
            backend: makes the pools of a manager that has no backend; None: Ray.

        Raises:
            PlacementError: names a pool that does not fit and what it lacks. Nothing was started.
        """
        if self.backend is None and backend is None:
            from quadriga.backends import get_backend

            self.backend = get_backend("ray")
        maker = self.backend or backend
        assert maker is not None
        pools = {
            name: maker.resource_pool(list(ranks), name_prefix=name, **self.pool_options)
            for name, ranks in self.resource_pool_spec.items()
        }
        # All pools at once: two pools that fit alone may not fit together.
        maker.check_placement(list(pools.values()))
        self.resource_pool_dict.update(pools)

    def pool_name(self, *roles: Role) -> str:
        """Return the name of the pool of the first of these roles that is mapped.

        Raises:
            UnknownNameError: none is mapped to a pool.
        """
        for role in roles:
            if role in self.mapping:
                return self.mapping[role]
        mapped = [str(role) for role in self.mapping]
        expected = " or ".join(map(str, roles))
        text = f"the run needs role {expected}, which is mapped to no pool; mapped roles: {mapped}"
        raise UnknownNameError(text, name=roles[0].key, known=mapped)

    def get_resource_pool(self, role: Role) -> ResourcePool:
        """Return the pool of `role`, after `create_resource_pool`.

        Raises:
            UnknownNameError: the role is not mapped to a pool.
        """
        return self.resource_pool_dict[self.pool_name(role)]

    def get_n_gpus(self) -> int:
        """Return the number of ranks over all pools; with accelerators, one GPU per rank."""
        return sum(sum(ranks) for ranks in self.resource_pool_spec.values())
