"""Settings with the sections of added roles."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from quadriga.algorithms.user_files import load_user_file
from quadriga.config.loading import given_user_files, load_config
from quadriga.config.role_ranks import added_keys, with_roles
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError
from quadriga.trainer.roles.registry import registered_for


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
                "quadriga.trainer.roles.settings",
                key=f"placement.{added.key}",
            )
