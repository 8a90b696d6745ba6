"""What a program for verl gives to a trainer, as Quadriga's: settings, roles and pools, rewards.

verl starts only the roles that its trainer knows, and does not tell about others. Here a role of
the program takes part in the run if `register_role` has said which stage calls it; any other one is
an error.
"""

import dataclasses
import importlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from quadriga.algorithms.advantages import get_advantage
from quadriga.algorithms.policy_losses import ALIASES, POLICY_LOSSES
from quadriga.compat.verl.config import VerlConfig, VerlSettings, setting
from quadriga.compat.verl.controller.groups import ResourcePoolManager
from quadriga.compat.verl.policy_losses import POLICY_LOSS_REGISTRY
from quadriga.compat.verl_settings import ESTIMATOR, TRAIN, Row, plain_values, to, translate
from quadriga.config.commands import EvalConfig, GenerateConfig, SFTConfig
from quadriga.config.convert import build
from quadriga.config.role_ranks import with_roles
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError
from quadriga.single_controller import Worker
from quadriga.single_controller.worker import plain_class
from quadriga.trainer.preflight import check_train_config
from quadriga.trainer.roles import registry
from quadriga.trainer.roles.needs import uses_of_run
from quadriga.trainer.roles.workers import ROLES_OF_USE, use_gpu, uses_by_pool

C = TypeVar("C", TrainConfig, SFTConfig, GenerateConfig, EvalConfig)

setattr(registry.Role, "register", registry.Role.add)  # noqa: B010 - verl's name

_REWARD_MODEL = registry.Role.RewardModel.key
"""Also the name of a section of verl, which a program may leave in its configuration."""


def settings_of(config: VerlConfig, cls: type[C], table: Mapping[str, Row], tell: bool = True) -> C:
    """Return our settings: `config` itself, or its translation. `tell`: report on stderr."""
    if isinstance(config, cls):
        return config
    translation = translate(cls, table, plain_values(config))
    if tell:
        print(translation.report(), file=sys.stderr)
    return translation.config


def train_settings(config: VerlConfig, tell: bool = True) -> TrainConfig:
    """Return the settings of a training, with a section for each role that the program has added.

    The section of a role, `judge: {weight: 2}`, has the keys of its settings; the report lists the
    section of a role that is not registered as ignored.
    """
    if isinstance(config, TrainConfig):
        return config
    added = registry.registered_for(())
    cls = with_roles({role.key: role.settings for role in added})
    values = plain_values(config)
    table = TRAIN
    if any(role.key == _REWARD_MODEL for role in added):
        _drop_switch(values)
        table = {key: row for key, row in TRAIN.items() if f"{_REWARD_MODEL}." not in key}
    return settings_of(values, cls, {**table, **_rows(added)}, tell)


def _rows(added: tuple[registry.AddedRole, ...]) -> dict[str, Row]:
    """Return the rows of the sections of added roles."""
    rows: dict[str, Row] = {}
    for role in added:
        if role.settings is None:
            continue
        if role.key == _REWARD_MODEL:  # verl has other keys in this section
            names = [field.name for field in dataclasses.fields(role.settings)]
            keys = [f"{role.key}.{name}" for name in names]
            rows |= {key: dataclasses.replace(to(key), of_role=True) for key in keys}
        else:  # as a whole, so that an unknown key is an error
            rows[role.key] = to(role.key)
    return rows


def _drop_switch(values: dict[str, object]) -> None:
    """Remove verl's switch of its own reward model, which a role replaces, from plain values."""
    for parent in (values, values.get("reward")):
        section = parent.get(_REWARD_MODEL) if isinstance(parent, dict) else None
        if isinstance(section, dict):
            section.pop("enable", None)


def omega_conf_to_dataclass(config: VerlConfig, dataclass_type: type | None = None) -> Any:
    """Return a section of settings as an object of a class; another object unchanged.

    Without settings the class has its defaults. Without a class, the section names one of verl
    under `_target_`; sections in it may do the same.

    Raises:
        ConfigError: there is no such class, or a setting does not fit it.
    """
    if not config:
        return None if dataclass_type is None else dataclass_type()
    if isinstance(config, VerlSettings) or not isinstance(config, Mapping):
        return config
    values = plain_values(config)
    target = str(values.pop("_target_", None))
    if dataclass_type is None:
        module, _, name = target.rpartition(".")
        if module.partition(".")[0] != "verl":  # a class of any other module is not imported
            text = f"pass a dataclass, or a section with a class of verl as _target_, not {target}"
            raise ConfigError(f"omega_conf_to_dataclass: {text}", key="_target_")
        try:
            dataclass_type = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"omega_conf_to_dataclass: {error}", key="_target_") from None
    if dataclasses.is_dataclass(dataclass_type):
        return build(dataclass_type, values)
    if not (isinstance(dataclass_type, type) and issubclass(dataclass_type, VerlSettings)):
        raise ConfigError(f"omega_conf_to_dataclass: {dataclass_type!r} must be a dataclass")
    inner = {k: v for k, v in values.items() if isinstance(v, dict) and "_target_" in v}
    return dataclass_type(**values | {k: omega_conf_to_dataclass(v) for k, v in inner.items()})


def need_reference_policy(config: VerlConfig) -> bool:
    """Return whether a stage reads the reference policy."""
    actor = setting(setting(config, "actor_rollout_ref"), "actor")
    in_reward = setting(setting(config, "algorithm"), "use_kl_in_reward", False)
    return bool(in_reward or setting(actor, "use_kl_loss", False))


def need_critic(config: VerlConfig) -> bool:
    """Return whether the estimator reads values."""
    name = setting(setting(config, "algorithm"), "adv_estimator", "gae")
    return get_advantage(str(ESTIMATOR(name))).needs_values


def check_policy_loss(config: TrainConfig) -> None:
    """Raise `ConfigError` for a policy loss that only a loop of verl's own can use."""
    name = config.actor_rollout_ref.actor.policy_loss.name
    if name in POLICY_LOSS_REGISTRY and name not in {**POLICY_LOSSES, **ALIASES}:
        raise ConfigError(
            f"the policy loss {name!r} was added with verl's register_policy_loss and returns one "
            "number for all tokens, but the trainer needs the loss of each token; add it with "
            "quadriga.algorithms.policy_losses.register_policy_loss "
            "(docs/concepts/policy_losses.md)",
            key="actor_rollout_ref.actor.policy_loss.name",
        )


def validate_config(
    config: VerlConfig, use_reference_policy: bool | None = None, use_critic: bool | None = None
) -> None:
    """Check the settings of a training as `RayPPOTrainer` does, before anything starts.

    `use_reference_policy`, `use_critic`: what the program assumes; None: nothing.

    Raises:
        InputError: names the first setting, file or folder that does not fit, or the assumption
            that differs from what the settings say.
    """
    for name, given, needed in (
        ("use_reference_policy", use_reference_policy, need_reference_policy),
        ("use_critic", use_critic, need_critic),
    ):
        if given is not None and given != needed(config):
            raise ConfigError(
                f"validate_config: got {name}={given}, but {needed.__name__}(config) is "
                f"{needed(config)}; pass what it returns",
                key=name,
            )
    ours = train_settings(config, tell=False)
    check_policy_loss(ours)
    check_train_config(ours)


_POLICY = (registry.Role.ActorRolloutRef, registry.Role.ActorRollout, registry.Role.Actor)


def worker_classes(mapping: Mapping[registry.Role, object]) -> dict[registry.Role, type[Worker]]:
    """Return the worker class of each role, also for the results of `ray.remote`."""
    return {role: plain_class(cls) for role, cls in mapping.items()}


def check_called(roles: Iterable[registry.Role], config: TrainConfig, where: str) -> None:
    """Check that a stage calls each role that a program has added to a trainer.

    Args:
        roles: the roles that have a worker class or a pool.
        config: the settings, with the added roles of the run.
        where: the name of the mapping, for the message.

    Raises:
        ConfigError: names the role, and what to write.
    """
    known = {added.role for added in registry.added_roles(config)}
    for role in roles:
        if not isinstance(role, registry.Role):
            raise ConfigError(
                f"{where} has the key {role!r}, expected a role: Role.Critic, or the result of "
                "Role.add('Judge')"
            )
        if not (registry.is_built_in(role) or role == registry.Role.RewardModel or role in known):
            raise ConfigError(
                f"{where} has role {role}, but no stage of a step calls it. Register it before the "
                f"run: register_role(Role.{role.name}, worker=…, stages=[RoleStage('method', "
                "reads=(…), writes=(…), after='score_responses')]) of quadriga.trainer.roles; "
                "docs/concepts/roles.md has a program"
            )


def check_stages(config: TrainConfig) -> None:
    """Check that the added roles of a run have stages. Raises `ConfigError` for one without."""
    for added in registry.added_roles(config):
        if not added.stages:
            raise ConfigError(
                f"role {added.key} is registered without stages, so nothing would call it in a "
                f"step; pass stages=[RoleStage(…)] to register_role(Role.{added.role.name}, …)"
            )


def pools_of(
    manager: ResourcePoolManager[registry.Role] | registry.ResourcePoolManager | None,
    config: TrainConfig,
    device: str,
) -> registry.ResourcePoolManager | None:
    """Return the pools of the run, from those of a program. None: those of the settings.

    An added role that is mapped to no pool shares the pool of the policy. A pool of verl's manager
    that no role of the run uses is left out, and so is such a role; stderr names them.
    """
    if not isinstance(manager, ResourcePoolManager):
        return manager
    mapping = dict(manager.mapping)
    shared = next((mapping[role] for role in _POLICY if role in mapping), None)
    if shared is not None:
        mapping = {added.role: shared for added in registry.added_roles(config)} | mapping
    spec, count = manager.resource_pool_spec, manager.max_colocate_count
    options: dict[str, object] = {"use_gpu": use_gpu(device), "max_colocate_count": count}
    given = registry.ResourcePoolManager(spec, mapping, pool_options=options)
    used = uses_by_pool(config, given)
    uses = {role for use in uses_of_run(config) for role in ROLES_OF_USE.get(use, ())}
    uses |= {added.role for added in registry.added_roles(config)}
    if idle := [str(role) for role in mapping if role not in uses]:
        print(f"roles that this run does not use: {', '.join(idle)}", file=sys.stderr)
    if unused := [name for name in spec if name not in used]:
        told = f"pools without a role of this run, which are not created: {', '.join(unused)}"
        print(told, file=sys.stderr)
        spec = {name: ranks for name, ranks in spec.items() if name in used}
        mapping = {role: name for role, name in mapping.items() if name in used}
        given = registry.ResourcePoolManager(spec, mapping, pool_options=options)
    return given
