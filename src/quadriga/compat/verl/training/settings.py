"""From a configuration of verl to settings of Quadriga, with the sections of added roles."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import TypeVar

from quadriga.algorithms.advantages import get_advantage
from quadriga.algorithms.policy_losses import ALIASES, POLICY_LOSSES
from quadriga.compat.verl.algorithms.policy_losses import POLICY_LOSS_REGISTRY
from quadriga.compat.verl.config import VerlConfig, setting
from quadriga.config.commands import EvalConfig, GenerateConfig, SFTConfig
from quadriga.config.role_ranks import with_roles
from quadriga.config.schema import TrainConfig
from quadriga.config.verl.settings import plain_values, translate
from quadriga.config.verl.table import ESTIMATOR, TRAIN, Row, to
from quadriga.errors import ConfigError
from quadriga.trainer.preflight import check_train_config
from quadriga.trainer.roles.placement import Role
from quadriga.trainer.roles.registry import AddedRole, registered_for

C = TypeVar("C", TrainConfig, SFTConfig, GenerateConfig, EvalConfig)

_REWARD_MODEL = Role.RewardModel.key
"""Also the name of a section of verl, which a program may leave in its configuration."""


def settings_of(
    config: VerlConfig,
    cls: type[C],
    table: Mapping[str, Row],
    tell: bool = True,
) -> C:
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
    added = registered_for(())
    cls = with_roles({role.key: role.settings for role in added})
    values = plain_values(config)
    if any(role.key == _REWARD_MODEL for role in added):
        values = _without_switch(values)
    return settings_of(values, cls, {**TRAIN, **_rows(added)}, tell)


def _rows(added: tuple[AddedRole, ...]) -> dict[str, Row]:
    """Return the rows of the sections of added roles."""
    rows: dict[str, Row] = {}
    for role in added:
        if role.settings is None:
            continue
        if role.key == _REWARD_MODEL:  # verl has other keys in this section
            names = [field.name for field in dataclasses.fields(role.settings)]
            rows |= {key: to(key) for key in (f"{role.key}.{name}" for name in names)}
        else:  # as a whole, so that an unknown key is an error
            rows[role.key] = to(role.key)
    return rows


def _without_switch(values: Mapping[str, object]) -> dict[str, object]:
    """Return values without verl's switch of its own reward model, which a role replaces."""

    def off(section: object) -> object:
        return {**section, "enable": None} if isinstance(section, Mapping) else section

    changed = dict(values)
    if _REWARD_MODEL in changed:
        changed[_REWARD_MODEL] = off(changed[_REWARD_MODEL])
    reward = changed.get("reward")
    if isinstance(reward, Mapping) and _REWARD_MODEL in reward:
        changed["reward"] = {**reward, _REWARD_MODEL: off(reward[_REWARD_MODEL])}
    return changed


def need_reference_policy(config: VerlConfig) -> bool:
    """Return whether a stage reads the reference policy."""
    actor = setting(setting(config, "actor_rollout_ref"), "actor")
    in_reward = setting(setting(config, "algorithm"), "use_kl_in_reward", False)
    return bool(in_reward or setting(actor, "use_kl_loss", False))


def need_critic(config: VerlConfig) -> bool:
    """Return whether the estimator reads values."""
    name = setting(setting(config, "algorithm"), "adv_estimator", "gae")
    return get_advantage(str(ESTIMATOR(name))).needs_values


def check_settings(config: TrainConfig) -> None:
    """Check the settings of a training before anything starts.

    Raises:
        InputError: names the first setting, file or folder that does not fit.
    """
    name = config.actor_rollout_ref.actor.policy_loss.name
    if name in POLICY_LOSS_REGISTRY and name not in {**POLICY_LOSSES, **ALIASES}:
        raise ConfigError(
            f"the policy loss {name!r} was added with verl's register_policy_loss and returns one "
            "number for all tokens, but the trainer needs the loss of each token; add it with "
            "quadriga.algorithms.policy_losses.register_policy_loss "
            "(docs/concepts/policy_losses.md)",
            key="actor_rollout_ref.actor.policy_loss.name",
        )
    check_train_config(config)


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
    check_settings(train_settings(config, tell=False))
