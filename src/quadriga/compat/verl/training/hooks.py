"""The hooks of verl's `TaskRunner`: how they are checked and called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol, TypeAlias

from quadriga.compat.verl.config import VerlConfig
from quadriga.compat.verl.controller.pools import ResourcePoolManager
from quadriga.errors import ConfigError, DispatchError
from quadriga.single_controller.worker import plain_class
from quadriga.trainer.roles.placement import ResourcePoolManager as QuadrigaPools
from quadriga.trainer.roles.placement import Role

PoolManager: TypeAlias = "ResourcePoolManager[Role] | QuadrigaPools"

RUN = "run"
HOOKS: dict[str, tuple[str, ...]] = {
    "add_actor_rollout_worker": ("config",),
    "add_critic_worker": ("config",),
    "add_reward_model_resource_pool": ("config",),
    "add_teacher_model_resource_pool": ("config",),
    "add_ref_policy_worker": ("config", "ref_policy_cls"),
    "init_resource_pool_mgr": ("config",),
}
"""The hooks that every runner has → the names of their arguments."""
_POLICY = (Role.ActorRolloutRef, Role.ActorRollout, Role.Actor)
_NO_METHOD = object()


class HookedRunner(Protocol):
    """A runner with its hooks, as `TaskRunner`."""

    role_worker_mapping: dict[Role, object]
    mapping: dict[Role, str]

    def add_actor_rollout_worker(self, config: VerlConfig) -> tuple[type, type]:
        """Choose the class of the policy."""
        ...

    def add_critic_worker(self, config: VerlConfig) -> None:
        """Choose the class of the critic."""
        ...

    def add_reward_model_resource_pool(self, config: VerlConfig) -> None:
        """Choose a pool for the reward model."""
        ...

    def add_teacher_model_resource_pool(self, config: VerlConfig) -> None:
        """Choose a pool for the teacher."""
        ...

    def add_ref_policy_worker(self, config: VerlConfig, ref_policy_cls: type) -> None:
        """Choose the class of the reference."""
        ...

    def init_resource_pool_mgr(self, config: VerlConfig) -> PoolManager:
        """Return the pools."""
        ...


def call_hooks(runner: HookedRunner, config: VerlConfig) -> tuple[type, PoolManager]:
    """Check the hooks of a runner, and call them. Return the class of groups and the pools.

    Raises:
        ConfigError: a hook cannot be called, or returns something else than expected.
    """
    _check_mappings(runner)
    added = _added_hooks(type(runner), vars(runner))
    _check_hooks(runner, added)
    chosen = runner.add_actor_rollout_worker(config)
    if not isinstance(chosen, tuple) or len(chosen) != 2:
        raise ConfigError(
            "add_actor_rollout_worker must return (class of the policy, class of groups), got "
            f"{chosen!r}"
        )
    policy_class, group_class = chosen
    runner.add_critic_worker(config)
    runner.add_reward_model_resource_pool(config)
    runner.add_teacher_model_resource_pool(config)
    runner.add_ref_policy_worker(config, policy_class)
    for name in added:
        getattr(runner, name)(config)
    if not any(role in runner.role_worker_mapping for role in _POLICY):
        raise ConfigError(
            f"{type(runner).__name__} has chosen no class for the policy; set "
            "self.role_worker_mapping[Role.ActorRollout] in add_actor_rollout_worker"
        )
    pools = runner.init_resource_pool_mgr(config)
    if not isinstance(pools, ResourcePoolManager | QuadrigaPools):
        raise ConfigError(
            f"init_resource_pool_mgr must return a ResourcePoolManager, got {pools!r}"
        )
    return group_class, pools


def check_runner(runner_class: object, built_in: type) -> None:
    """Check a class that `run_ppo` builds and runs, before anything starts.

    `built_in`: verl's runner; the hooks of a subclass that keeps its `run` are checked too.

    Raises:
        ConfigError: names the method, and what is wrong with it.
    """
    try:
        cls: type | None = plain_class(runner_class)
    except DispatchError:
        cls = None
    if cls is None or not hasattr(cls, RUN):
        raise ConfigError(
            f"run_ppo: task_runner_class must be a class with a method {RUN}, got {runner_class!r}",
            key="task_runner_class",
        )
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise ConfigError(
            f"run_ppo builds {cls.__name__}() without arguments: {error}", key="task_runner_class"
        ) from None
    _check_method(cls, RUN, ("config",))
    if issubclass(cls, built_in) and getattr(cls, RUN) is getattr(built_in, RUN):
        _check_hooks(cls, _added_hooks(cls))


def _check_mappings(runner: HookedRunner) -> None:
    name = type(runner).__name__
    for attribute in ("role_worker_mapping", "mapping"):
        if not hasattr(runner, attribute):
            raise ConfigError(f"{name} has no {attribute}; call super().__init__() in __init__")
        value: object = getattr(runner, attribute)
        if not isinstance(value, dict):
            raise ConfigError(f"{name}.{attribute} must be a dict, got {value!r}")


def _added_hooks(cls: type, own: Iterable[str] = ()) -> list[str]:
    """Return the names of the hooks that subclasses of `TaskRunner` add, in their order.

    `own`: the attributes of the object.
    """
    names = [name for base in reversed(cls.__mro__) for name in vars(base)]
    return [
        name
        for name in dict.fromkeys([*names, *own])
        if name.startswith("add_")
        and name.endswith(("_worker", "_resource_pool"))
        and name not in HOOKS
    ]


def _check_hooks(owner: object, added: Iterable[str]) -> None:
    for name, arguments in {**HOOKS, **dict.fromkeys(added, ("config",))}.items():
        _check_method(owner, name, arguments)


def _check_method(owner: object, name: str, arguments: tuple[str, ...]) -> None:
    """Check that a method of a class or of an object is a plain function with these arguments."""
    cls = owner if isinstance(owner, type) else type(owner)
    method = _method_of_class(owner, name) if isinstance(owner, type) else getattr(owner, name)
    if method is _NO_METHOD:
        return
    if not callable(method):
        raise ConfigError(f"{cls.__name__}.{name} must be a method, got {method!r}")
    check_plain(cls, name, method)
    signature = inspect.signature(method)
    try:
        signature.bind(*arguments)
    except TypeError:
        raise ConfigError(
            f"TaskRunner calls {name}({', '.join(arguments)}), but {cls.__name__} defines "
            f"{name}{signature}; change its parameters"
        ) from None


def check_plain(cls: type, name: str, method: object) -> None:
    """Check that a call of a method runs its body. Raises `ConfigError` that names the method."""
    kinds: dict[str, Callable[[object], bool]] = {
        "a coroutine function": inspect.iscoroutinefunction,
        "an asynchronous generator function": inspect.isasyncgenfunction,
        "a generator function": inspect.isgeneratorfunction,
    }
    for kind, applies in kinds.items():
        if applies(method):
            raise ConfigError(
                f"{cls.__name__}.{name} is {kind}, whose body would not run, because nothing "
                "awaits or iterates it; write it as a plain function"
            )


def _method_of_class(cls: type, name: str) -> object:
    """Return a method of a class as an object of it has it, without making an object.

    Return `_NO_METHOD` for what only an object can tell: a property.
    """
    found = inspect.getattr_static(cls, name)
    if inspect.isfunction(found):
        return partial(found, None)
    if isinstance(found, staticmethod | classmethod) or not hasattr(found, "__get__"):
        return getattr(cls, name)
    return _NO_METHOD
