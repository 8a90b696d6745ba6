"""Check the settings of the reward model against each other."""

from __future__ import annotations

from quadriga.config.checks.engine import check_engine_ranks
from quadriga.config.checks.trained_part import check_whole_model
from quadriga.config.checks.unread import check_frozen_engine
from quadriga.config.role_ranks import has_reward_model
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError

_KEY = "reward_model"


def check_reward_model_settings(config: TrainConfig, ranks: int) -> None:
    """Check the section `reward_model`, if the reward model takes part in the run.

    Args:
        ranks: ranks of the role.

    Raises:
        ConfigError: a setting is missing, has no effect, or does not fit the ranks.
    """
    if not has_reward_model(config):
        return
    settings = config.reward_model
    if not settings.model.path:
        raise ConfigError(
            f"{_KEY}.enable=true needs a model: set {_KEY}.model.path to the folder of a sequence "
            "classifier with one label, such as `quadriga rm` writes it",
            key=f"{_KEY}.model.path",
        )
    check_whole_model(f"{_KEY}.model", settings.model)
    check_engine_ranks(f"{_KEY}.engine", settings.engine, ranks)
    check_frozen_engine(f"{_KEY}.engine", settings.engine, "the reward model")
    if not settings.weight:
        raise ConfigError(
            f"{_KEY}.weight=0 gives the reward model no part in the reward; set {_KEY}.enable=false"
            ", or another weight",
            key=f"{_KEY}.weight",
        )
    if config.algorithm.reward_components and not settings.rule_weight:
        raise ConfigError(
            f"algorithm.reward_components are numbers of the rules, and {_KEY}.rule_weight=0 does "
            "not call them in training; remove one of them",
            key=f"{_KEY}.rule_weight",
        )
    if settings.engine.fused_head:
        raise ConfigError(
            f"{_KEY}.engine.fused_head=true is for log-probabilities, and a reward model computes "
            "one number a sequence; set it to null",
            key=f"{_KEY}.engine.fused_head",
        )
