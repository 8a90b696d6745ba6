"""Everything that can be found wrong before a worker starts, found before a worker starts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from quadriga.algorithms.advantages import ADVANTAGES, get_advantage
from quadriga.algorithms.aggregation import AGGREGATIONS
from quadriga.algorithms.kl import KL_ESTIMATORS
from quadriga.algorithms.policy_losses import POLICY_LOSSES
from quadriga.algorithms.user_files import load_user_file
from quadriga.config.checks import (
    KnownNames,
    check_sft_settings,
    check_train_settings,
)
from quadriga.config.schema import RewardConfig, SFTConfig, TrainConfig
from quadriga.engines import ENGINES
from quadriga.errors import ConfigError, DataError
from quadriga.observability.run_folder import RunFolder
from quadriga.observability.trackers import check_trackers
from quadriga.rollout import ROLLOUTS
from quadriga.trainer.resuming import checkpoint_to_resume


def check_train_config(config: TrainConfig) -> None:
    """Settings against each other, then files and folders.

    Raises:
        InputError: names the first thing that does not fit.
    """
    for path in config.algorithm.user_files:
        load_user_file(path)
    check_train_settings(config, known_names())
    check_files(config.data.train_files, "data.train_files", needed=True)
    check_files(config.data.val_files, "data.val_files", needed=False)
    check_models(config)
    check_components(config)
    check_reward(config.reward)
    check_trackers(config.trainer.loggers)
    resumed = checkpoint_to_resume(config.trainer) is not None
    folder = RunFolder(Path(config.trainer.default_local_dir))
    folder.check(resume=resumed, overwrite=config.trainer.overwrite)


def check_sft_config(config: SFTConfig) -> None:
    """The same for `quadriga sft`.

    Raises:
        InputError: names the first thing that does not fit.
    """
    from quadriga.models import check_model_folder

    check_sft_settings(config, known_names())
    check_files(config.data.train_files, "data.train_files", needed=True)
    check_files(config.data.val_files, "data.val_files", needed=False)
    check_model_folder(config.model.path)
    check_reward(config.reward)
    check_trackers(config.trainer.loggers)
    RunFolder(Path(config.trainer.default_local_dir)).check(overwrite=config.trainer.overwrite)


def known_names() -> KnownNames:
    """The registries' names, user's additions included, for the settings' checks."""
    return KnownNames(
        estimators=frozenset(ADVANTAGES),
        estimators_with_values=frozenset(k for k, e in ADVANTAGES.items() if e.needs_values),
        estimators_with_groups=frozenset(k for k, e in ADVANTAGES.items() if e.needs_groups),
        policy_losses=frozenset(POLICY_LOSSES),
        aggregations=frozenset(AGGREGATIONS),
        kl_estimators=frozenset(KL_ESTIMATORS),
        rollouts=frozenset(ROLLOUTS),
        engines=frozenset(ENGINES),
    )


def check_files(files: Iterable[str], setting: str, *, needed: bool) -> None:
    """Every file exists; at least one if needed."""
    files = list(files)
    if needed and not files:
        raise DataError(f"{setting} is empty: give at least one .parquet or .jsonl file")
    for file in files:
        if not Path(file).is_file():
            raise DataError(f"{setting}: no such file: {file}", path=file)


def check_models(config: TrainConfig) -> None:
    """The actor's folder, and the critic's if it has one of its own."""
    from quadriga.models import check_model_folder

    check_model_folder(config.actor_rollout_ref.model.path)
    if config.critic.model.path:
        check_model_folder(config.critic.model.path)


def check_components(config: TrainConfig) -> None:
    """An estimator that reads reward components is given their names."""
    name = config.algorithm.adv_estimator
    if get_advantage(name).needs_components and not config.algorithm.reward_components:
        raise ConfigError(
            f"algorithm.adv_estimator={name} reads reward components: name them in "
            "algorithm.reward_components, and return them in the reward function's dict",
            key="algorithm.reward_components",
        )


def check_reward(reward: RewardConfig) -> None:
    """A user's reward file exists and holds the function."""
    from quadriga.rewards import load_reward_function

    if reward.path is not None:
        load_reward_function(reward.path, reward.name)
