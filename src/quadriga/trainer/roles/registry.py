"""The roles, the pool of processes on which each role runs, and the roles that users add.

An added role declares its worker class, its settings, its start order, and its calls in a step:

    JUDGE = Role.add("Judge")
    register_role(
        JUDGE,
        worker=JudgeWorker,
        settings=JudgeConfig,
        starts_after=[Role.Critic],
        stages=[
            RoleStage("judge", reads=(RESPONSES,), writes=("judgement",), before="shape_scores")
        ],
    )

A role that a file of `algorithm.user_files` registers takes part in the runs whose settings name
this file. A role that a program registers by itself takes part in every run of the program.
"""

from __future__ import annotations

import dataclasses
import keyword
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from quadriga.algorithms.user_files import load_user_file, running_user_file
from quadriga.config.loading import given_user_files, load_config
from quadriga.config.role_ranks import added_keys, with_roles
from quadriga.config.schema import Options, TrainConfig
from quadriga.errors import ConfigError, UnknownNameError
from quadriga.observability.metrics import METRICS
from quadriga.protocol.fields import StageFields

if TYPE_CHECKING:
    from quadriga.single_controller import Backend, ResourcePool, Worker

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
            f"there is no role {text!r}; roles: {', '.join(keys)}. Role.add adds one", key=str(text)
        )

    @classmethod
    def all(cls) -> Iterator[Role]:
        """Return every role, in the order in which they were added."""
        return iter(tuple(_ROLES.values()))

    def __str__(self) -> str:
        return self.key


def _snake_case(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() and i else c.lower() for i, c in enumerate(name))


for _name in ("Actor", "Rollout", "ActorRollout", "Critic"):
    Role.add(_name)
Role.add("RefPolicy", "ref")
for _name in ("RewardModel", "ActorRolloutRef"):
    Role.add(_name)


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
    pool_options: Options = dataclasses.field(default_factory=dict)
    resource_pool_dict: dict[str, ResourcePool] = dataclasses.field(
        default_factory=dict, init=False
    )

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


_BUILT_IN = tuple(role for role in Role.all() if role != Role.RewardModel)
_RESERVED = {
    *(role.key for role in _BUILT_IN),
    "actor_ref",
    "rollout_ref",  # workers of the policy
    *(field.name for field in dataclasses.fields(TrainConfig)),
    *(name.partition("/")[0] for name in METRICS),  # metrics of a role begin with its key
} - {Role.RewardModel.key}  # a role of a user can be in place of the built-in one


@dataclass(frozen=True)
class RoleStage:
    """One call of a role in each step: a stage that stands beside a named one.

    Attributes:
        method: the worker method. It takes a batch with the fields `reads`, and returns one with
            the fields `writes` and the same rows; numbers under `meta_info["metrics"]` are logged.
        reads: fields that must be in the batch. The method receives these and no others.
        writes: fields that the method returns; fields that exist are replaced. Without any, the
            method is an update: it may return metrics, and rows are never padded.
        reads_if_present: fields that it receives only where an earlier stage has written them.
        before, after: the name of a stage of `trainer.dataflow`, or of a stage of an added role,
            `judge.score`. Exactly one of both is given.
        in_validation: whether the stage also runs in validation.
    """

    method: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    reads_if_present: tuple[str, ...] = ()
    before: str | None = None
    after: str | None = None
    in_validation: bool = False

    def __post_init__(self) -> None:
        for name in ("reads", "writes", "reads_if_present"):
            if isinstance(value := getattr(self, name), str):  # it would be a field per letter
                raise ConfigError(f"RoleStage {self.method!r}: {name} must be a tuple of names, "
                                  f"got {value!r}", key="algorithm.user_files")  # fmt: skip

    @property
    def neighbour(self) -> str:
        """The name of the stage that it stands beside."""
        return self.before or self.after or ""


@dataclass(frozen=True)
class AddedRole:
    """A role of a user.

    Attributes:
        worker: None if a trainer is given the class in `role_worker_mapping`.
        origin: the file that registered it, "" for a program.
    """

    role: Role
    worker: type[Worker] | None
    settings: type | None
    stages: tuple[RoleStage, ...]
    starts_after: tuple[Role, ...]
    starts_before: tuple[Role, ...]
    origin: str

    @property
    def key(self) -> str:
        """The name of the role in settings, messages, metrics and checkpoints."""
        return self.role.key


@dataclass(frozen=True)
class PlacedStage:
    """A stage with the key of its role."""

    role: str
    stage: RoleStage

    @property
    def name(self) -> str:
        """The name of the stage in the dataflow, in messages and in times: "judge.score"."""
        return f"{self.role}.{self.stage.method}"

    @property
    def fields(self) -> StageFields:
        """What the stage reads and writes, under its name."""
        stage = self.stage
        return StageFields(self.name, stage.reads, stage.writes, stage.reads_if_present)


_ADDED: dict[str, AddedRole] = {}


def register_role(
    role: Role,
    *,
    worker: type[Worker] | None = None,
    settings: type | None = None,
    stages: Iterable[RoleStage] = (),
    starts_after: Iterable[Role] = (),
    starts_before: Iterable[Role] = (),
) -> AddedRole:
    """Add a role to training runs.

    Args:
        role: a result of `Role.add`, or `Role.RewardModel`.
        worker: the worker class. Its constructor receives `config`, an object of `settings`, and
            `runtime`, a `RankRuntime`, if it has parameters of these names.
        settings: a frozen dataclass with a default for every field: the section `<key>` of the
            settings. None: the role has no section.
        stages: its calls in each step.
        starts_after, starts_before: roles whose models are loaded earlier, and later. Roles that a
            run does not have are left out.

    Returns:
        The role as it is registered. A file that is loaded again replaces its own roles, and a
        program that registers a role again replaces it.

    Raises:
        ConfigError: the role is built in or registered by another file, its key cannot be used, or
            an argument is invalid.
    """
    order, origin = (tuple(starts_after), tuple(starts_before)), running_user_file() or ""
    added = AddedRole(role, worker, settings, tuple(stages), *order, origin)
    for problem in _problems(added):
        raise ConfigError(problem)
    _ADDED[added.key] = added
    return added


def register_again(roles: Iterable[AddedRole]) -> None:
    """Add roles that another process of the program has registered, and so has checked."""
    for added in roles:
        Role.add(added.role.name, added.role.key)
        _ADDED[added.key] = added


def registered_for(user_files: Sequence[str]) -> tuple[AddedRole, ...]:
    """Return the roles that these files have registered, and those of the program."""
    origins = {"", *(str(Path(file).resolve()) for file in user_files)}
    return tuple(added for added in _ADDED.values() if added.origin in origins)


def added_roles(config: TrainConfig) -> tuple[AddedRole, ...]:
    """Return the added roles of a run, in the order in which they were registered.

    Raises:
        UnknownNameError: the settings have a role that is not registered in this process.
    """
    keys = added_keys(config)
    for key in keys:
        if key not in _ADDED:
            raise UnknownNameError(
                f"the settings have role {key}, which is not registered in this process; load its "
                f"file first; registered: {', '.join(_ADDED) or 'none'}",
                name=key,
                known=list(_ADDED),
            )
    return tuple(_ADDED[key] for key in keys)


def added_stages(config: TrainConfig, *, validation: bool = False) -> tuple[PlacedStage, ...]:
    """Return the stages of the added roles of a run; `validation`: those that run there."""
    return tuple(
        PlacedStage(added.key, stage)
        for added in added_roles(config)
        for stage in added.stages
        if stage.in_validation or not validation
    )


def is_built_in(role: Role) -> bool:
    """Return whether the trainer calls a role without registration."""
    return role in _BUILT_IN


def _problems(added: AddedRole) -> Iterator[str]:
    """Yield why a role cannot be registered."""
    role, key = added.role, added.key
    if is_built_in(role):
        yield (
            f"role {role} is built in; to replace its worker class, pass role_worker_mapping to "
            "RayPPOTrainer; to add a role, use Role.add"
        )
    if key in _RESERVED or not (key.isascii() and key.isidentifier()) or keyword.iskeyword(key):
        yield (
            f"role {role.name} has key {key!r}, which is no identifier, or names a section of the "
            f"settings or a group of metrics; give it another one: Role.add({role.name!r}, key=…)"
        )
    before = _ADDED.get(key)
    # A file that is loaded again and a program may register their role again.
    if before is not None and (before.origin, before.role) != (added.origin, role):
        yield (
            f"role {key} is registered already as role {before.role.name}, by "
            f"{before.origin or 'the program'}; give the other role another name"
        )
    if added.settings is not None:
        yield from _settings_problems(key, added.settings)
    yield from _stage_problems(key, added.stages)


def _settings_problems(key: str, settings: type) -> Iterator[str]:
    # A subclass of a dataclass that has no decorator of its own lacks its own fields.
    parameters = vars(settings).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        yield f"role {key}: settings must be a class with @dataclass(frozen=True), got {settings!r}"
    for field in dataclasses.fields(settings):
        if field.default is field.default_factory is dataclasses.MISSING:
            yield f"role {key}: setting {field.name} of {settings.__name__} has no default"


def _stage_problems(key: str, stages: Sequence[RoleStage]) -> Iterator[str]:
    methods = [stage.method for stage in stages]
    for stage in stages:
        where = f"stage {key}.{stage.method}"
        if bool(stage.before) == bool(stage.after):
            places = f"before={stage.before!r} and after={stage.after!r}"
            yield f"{where} must stand before or after one stage, got {places}"
        if not stage.reads:
            yield f"{where} reads no field; name at least one, from which the method knows its rows"
        if methods.count(stage.method) > 1:
            yield f"role {key} has two stages that call {stage.method}; give each its own method"


def load_train_config(overrides: Iterable[str] = (), file: str | Path | None = None) -> TrainConfig:
    """Return the settings of `quadriga train`, with a section for each added role.

    The files of `algorithm.user_files` are loaded first, because they register the roles. Then
    `load_config` reads all settings: `judge.weight=2` and `placement.judge=[1]` are settings like
    any other, with types, nearest names and `${…}`.

    Raises:
        InputError: a file of the user cannot be loaded, or a setting is wrong.
    """
    overrides = list(overrides)
    user_files = given_user_files(overrides, file)
    for path in user_files:
        load_user_file(path)
    roles = {added.key: added.settings for added in registered_for(user_files)}
    return load_config(with_roles(roles), overrides, file)


def check_roles_in_settings(config: TrainConfig) -> None:
    """Check that the settings have every role that the program and its files have registered.

    Raises:
        ConfigError: the role would take no part in the run.
    """
    known = set(added_keys(config))
    for added in registered_for(config.algorithm.user_files):
        if added.key not in known:
            raise ConfigError(
                f"role {added.key} of {added.origin or 'this program'} is registered, but these "
                "settings have no place for it; load them with load_train_config of "
                "quadriga.trainer.roles.registry",
                key=f"placement.{added.key}",
            )
