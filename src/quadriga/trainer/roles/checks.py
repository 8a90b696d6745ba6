"""Checks of added roles before any process starts: classes, methods, constructors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from quadriga.config.schema import TrainConfig
from quadriga.errors import CheckpointError, ConfigError
from quadriga.single_controller import ClassWithInitArgs, Dispatch, Worker, WorkerGroup
from quadriga.single_controller.dispatch import MethodRecord, registered_methods
from quadriga.trainer.roles.placement import Role
from quadriga.trainer.roles.registry import AddedRole, is_built_in
from quadriga.workers.runtime import RankRuntime

INIT, SAVE, LOAD = "init_model", "save_checkpoint", "load_checkpoint"
_ARGUMENTS = {INIT: (), SAVE: ("path", "step"), LOAD: ("path", "step")}
"""Methods that the trainer calls on every rank → the names of their arguments."""
_NO_BATCH = {
    "ONE_TO_ALL": "which returns a list and no batch",
    "ALL_TO_ALL": "which takes and returns lists with one entry per rank",
    "DP_COMPUTE": "which takes and returns lists with one entry per rank",
    "DP_COMPUTE_METRIC": "which returns a list and no batch",
    "DP_COMPUTE_PROTO_WITH_FUNC": "which takes a function",
    "DIRECT_ROLLOUT_METHOD": "which cannot be called through a group",
}
"""Dispatch modes that the method of a stage cannot have, and why."""


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
    cls = mapping.get(added.role, added.worker)
    if cls is None:
        raise ConfigError(
            f"role {added.key} has no worker class; pass worker=… to register_role, or "
            "role_worker_mapping to RayPPOTrainer"
        )
    if not (isinstance(cls, type) and issubclass(cls, Worker)):
        raise ConfigError(
            f"role {added.key}: the worker class must be a subclass of Worker, got {cls!r}"
        )
    _check_methods(added, cls)
    return ClassWithInitArgs(cls, **_arguments(added, cls, config, runtime))


def check_mapping(
    mapping: Mapping[Role, object],
    added: tuple[AddedRole, ...],
    name: str,
    enabled: Iterable[Role] = (),
) -> None:
    """Check that a program gives classes and pools only to roles that take part in the run.

    Args:
        name: of the argument that has the roles.
        enabled: further roles of the run.

    Raises:
        ConfigError: names a role that the trainer does not call.
    """
    known = {*enabled, *(one.role for one in added)}
    for role in mapping:
        if not is_built_in(role) and role not in known:
            raise ConfigError(
                f"{name} has role {role}, which the trainer does not call; register it with "
                "register_role and load the settings with load_train_config"
            )


def has_method(group: WorkerGroup, role: str, name: str) -> bool:
    """Return whether the workers of a role have a registered method."""
    return name in registered_methods(group.class_of(role))


def saving_roles(added: Iterable[AddedRole]) -> list[str]:
    """Return the keys of the roles whose registered classes have a state."""
    return [
        role.key
        for role in added
        if role.worker is not None and SAVE in registered_methods(role.worker)
    ]


def saved_roles(groups: Mapping[str, WorkerGroup]) -> dict[str, WorkerGroup]:
    """Return those of the groups whose workers have a state that belongs to a checkpoint."""
    return {key: group for key, group in groups.items() if has_method(group, key, SAVE)}


def check_states(checkpoint: Path, keys: Iterable[str]) -> None:
    """Check that a checkpoint holds the states of added roles, by their keys.

    Raises:
        CheckpointError: it was saved without one of them.
    """
    for key in keys:
        if not (checkpoint / key).is_dir():
            raise CheckpointError(
                f"{checkpoint} has no state of role {key}, whose workers save one: it was saved "
                "without this role; resume with the roles of that run, or start a new run",
                path=str(checkpoint),
            )


def _check_methods(added: AddedRole, cls: type[Worker]) -> None:
    methods = registered_methods(cls)
    missing = [stage.method for stage in added.stages if stage.method not in methods]
    if missing:
        raise ConfigError(
            f"role {added.key}: its stages call {', '.join(missing)}, but {cls.__name__} has no "
            "such registered method; define it and mark it with @register"
        )
    for name in methods:
        if any(hasattr(WorkerGroup, offered) for offered in (name, f"{added.key}_{name}")):
            raise ConfigError(
                f"role {added.key}: {cls.__name__} has a registered method {name}, but a worker "
                "group has this attribute itself; rename the method"
            )
    for stage in added.stages:
        _check_stage_method(added, cls, methods[stage.method])
    for name, arguments in _ARGUMENTS.items():
        if name in methods:
            _check_call_of_all_ranks(added, cls, methods[name], arguments)
    for one, other in ((SAVE, LOAD), (LOAD, SAVE)):
        if one in methods and other not in methods:
            raise ConfigError(
                f"role {added.key}: {cls.__name__} has {one} but no registered {other}; a "
                "checkpoint needs both"
            )


def _check_stage_method(added: AddedRole, cls: type[Worker], record: MethodRecord) -> None:
    name, mode, one_rank = record.name, record.current_dispatch, record.execute_mode.single
    where = f"role {added.key}: method {name} of {cls.__name__}"
    if name in _ARGUMENTS:
        raise ConfigError(f"{where} is called by the trainer itself; a stage needs another method")
    if mode.name in _NO_BATCH and not one_rank:
        raise ConfigError(
            f"{where} has dispatch mode {mode.name}, {_NO_BATCH[mode.name]}; use "
            "Dispatch.DP_COMPUTE_PROTO"
        )
    function = getattr(cls, name)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"{where} is a generator; a stage needs a method that returns a batch")
    if not _takes(function, ("data",)):
        raise ConfigError(
            f"{where} is called with one argument, the batch, but takes "
            f"{inspect.signature(function)}; change its parameters"
        )


def _check_call_of_all_ranks(
    added: AddedRole, cls: type[Worker], record: MethodRecord, arguments: Sequence[str]
) -> None:
    name = record.name
    modes = [Dispatch.ONE_TO_ALL] if arguments else [Dispatch.ONE_TO_ALL, Dispatch.ALL_TO_ALL]
    waits = record.blocking and not record.execute_mode.single
    if record.current_dispatch not in modes or not waits:
        raise ConfigError(
            f"role {added.key}: method {name} of {cls.__name__} must run on every rank and be "
            "waited for; use @register(dispatch_mode=Dispatch.ONE_TO_ALL)"
        )
    if not _takes(getattr(cls, name), arguments):
        raise ConfigError(
            f"role {added.key}: method {name} of {cls.__name__} is called with "
            f"({', '.join(arguments)}), but takes {inspect.signature(getattr(cls, name))}; change "
            "its parameters"
        )


def _takes(function: Callable[..., object], arguments: Sequence[str]) -> bool:
    """Whether a method can be called with these arguments by position."""
    try:
        inspect.signature(function).bind("self", *arguments)
    except TypeError:
        return False
    return True


def _arguments(
    added: AddedRole, cls: type[Worker], config: TrainConfig, runtime: RankRuntime
) -> dict[str, object]:
    """Return those of `config` and `runtime` that the constructor takes."""
    given: dict[str, object] = {"runtime": runtime}
    if added.settings is not None:
        given["config"] = getattr(config, added.key)
    parameters = inspect.signature(cls).parameters
    if added.settings is not None and "config" not in parameters:
        raise ConfigError(
            f"role {added.key} has settings, but the constructor of {cls.__name__} has no "
            "parameter `config`; add it"
        )
    for name, parameter in parameters.items():
        needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if needed and name not in given:
            raise ConfigError(
                f"role {added.key}: the constructor of {cls.__name__} needs `{name}`, but it is "
                f"given {' and '.join(given)}; give the parameter a default"
            )
    return {name: value for name, value in given.items() if name in parameters}
