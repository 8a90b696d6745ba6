"""Checks of the options of the policy loss and of the advantage estimator.

Options are arguments of a function, which may be one of the user, so the settings have no types or
ranges for them. The function itself is called with two short responses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from quadriga.algorithms.advantages import compute_advantages, get_advantage
from quadriga.algorithms.checks import require_finite
from quadriga.algorithms.policy_losses import compute_policy_loss, select_tokens
from quadriga.config.describe import as_written
from quadriga.config.schema import AlgorithmConfig, Options, PolicyLossConfig, TrainConfig
from quadriga.errors import ConfigError
from quadriga.workers.objectives import loss_settings

_LOSS = "actor_rollout_ref.actor.policy_loss"
_SHAPE = (2, 2)  # two responses of two tokens


def check_algorithm_options(config: TrainConfig) -> None:
    """Check that the policy loss and the estimator take their options.

    Raises:
        ConfigError: names the options, and says what the function says.
    """
    loss = config.actor_rollout_ref.actor.policy_loss
    _check_own(f"{_LOSS}.options", loss.options, loss)
    _check_own("algorithm.options", config.algorithm.options, config.algorithm)
    if loss.options:
        of_loss = f"{_LOSS}.name={loss.name}"
        _check_call(f"{_LOSS}.options", loss.options, of_loss, lambda: _call_loss(loss))
    if config.algorithm.options:
        name, options = config.algorithm.adv_estimator, config.algorithm.options
        of_estimator = f"algorithm.adv_estimator={name}"
        _check_call(
            "algorithm.options", options, of_estimator, lambda: _call_estimator(config.algorithm)
        )


def _check_own(key: str, options: Options, section: object) -> None:
    """Refuse an option that is a setting of its own: one of the two would be without effect."""
    section_key = key.rpartition(".")[0]
    for name in sorted(options.keys() & vars(section).keys()):
        raise ConfigError(
            f"{key}.{name}={as_written(options[name])} is a setting of its own; set "
            f"{section_key}.{name}",
            key=f"{key}.{name}",
        )


def _check_call(
    key: str, options: Mapping[str, object], of: str, call: Callable[[], object]
) -> None:
    given = ", ".join(f"{name}={as_written(value)}" for name, value in options.items())
    if any(map(_has_nan, options.values())):
        raise ConfigError(f"{key}: {of} does not take {given}: nan is no number", key=key)
    try:
        call()
    except Exception as error:  # anything that a function of the user may raise
        raise ConfigError(f"{key}: {of} does not take {given}: {error}", key=key) from error


def _has_nan(value: object) -> bool:
    """Return whether a value, or one in a list, is NaN, with which every comparison is false."""
    values = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(item, float) and math.isnan(item) for item in values)


def _call_loss(loss: PolicyLossConfig) -> None:
    old, advantages = torch.zeros(_SHAPE), torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    mask = torch.ones(_SHAPE, dtype=torch.bool)
    settings = loss_settings(loss)
    selected = select_tokens(
        loss.name, old_log_prob_BT=old, advantages_BT=advantages, response_mask_BT=mask, **settings
    )
    compute_policy_loss(
        loss.name,
        log_prob_BT=torch.zeros(_SHAPE, requires_grad=True),
        old_log_prob_BT=old,
        advantages_BT=advantages,
        response_mask_BT=mask,
        rollout_log_prob_BT=old,
        entropy_BT=torch.ones(_SHAPE),
        selected_BT=selected,
        **settings,
    )


def _call_estimator(config: AlgorithmConfig) -> None:
    needs = get_advantage(config.adv_estimator).needs
    inputs = {
        "values_BT": torch.zeros(_SHAPE),
        "reward_baselines_B": torch.zeros(2),
        "reward_components_BK": torch.eye(2, max(len(config.reward_components), 1)),
        "old_log_prob_BT": torch.zeros(_SHAPE),
    }
    advantages, returns = compute_advantages(
        config.adv_estimator,
        token_level_rewards_BT=torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
        response_mask_BT=torch.ones(_SHAPE, dtype=torch.bool),
        group_ids=["a", "a"],
        **{name: tensor for name, tensor in inputs.items() if name in needs},
        gamma=config.gamma,
        lam=config.lam,
        norm_adv_by_std=config.norm_adv_by_std,
        whiten_advantages=config.whiten_advantages,
        **config.options,
    )
    require_finite(advantages=advantages, returns=returns)
