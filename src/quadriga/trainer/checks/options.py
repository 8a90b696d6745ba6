"""Check the options of the policy loss and of the advantage estimator.

They are arguments of a function, which may be one of the user, so they have no types or ranges. The
function is called with two responses.
"""

import math
from collections.abc import Callable

import torch

from quadriga.algorithms.advantages import compute_advantages, get_advantage
from quadriga.algorithms.policy_losses import compute_policy_loss, select_tokens
from quadriga.algorithms.tensors import require_finite
from quadriga.config.convert import as_written
from quadriga.config.schema import AlgorithmConfig, PolicyLossConfig, TrainConfig
from quadriga.errors import ConfigError
from quadriga.workers.updates import loss_settings

_TWO_RESPONSES = (2, 2)  # of two tokens


def check_algorithm_options(config: TrainConfig) -> None:
    """Check that the policy loss and the estimator take their options.

    Raises:
        ConfigError: names the options, and says what the function says.
    """
    loss, algorithm = config.actor_rollout_ref.actor.policy_loss, config.algorithm
    key = "actor_rollout_ref.actor.policy_loss"
    _check_options(key, f"{key}.name={loss.name}", loss, lambda: _call_loss(loss))
    estimator = f"algorithm.adv_estimator={algorithm.adv_estimator}"
    _check_options("algorithm", estimator, algorithm, lambda: _call_estimator(algorithm))


def _check_options(
    key: str, name: str, section: PolicyLossConfig | AlgorithmConfig, call: Callable[[], None]
) -> None:
    options = section.options
    if not options:
        return
    for own in sorted(options.keys() & vars(section).keys()):  # one of the two has no effect
        raise ConfigError(
            f"{key}.options.{own}={as_written(options[own])} is a setting of its own; set "
            f"{key}.{own}",
            key=f"{key}.options.{own}",
        )
    try:
        # Every comparison with NaN is false, so a function would take it.
        for value in options.values():
            for item in value if isinstance(value, list | tuple) else [value]:
                if isinstance(item, float) and math.isnan(item):
                    raise ValueError("nan is no number")
        call()
    except Exception as error:  # anything that a function of the user may raise
        given = ", ".join(f"{name}={as_written(value)}" for name, value in options.items())
        text = f"{key}.options: {name} does not take {given}: {error}"
        raise ConfigError(text, key=f"{key}.options") from error


def _call_loss(loss: PolicyLossConfig) -> None:
    old, advantages = torch.zeros(_TWO_RESPONSES), torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    mask = torch.ones(_TWO_RESPONSES, dtype=torch.bool)
    settings = loss_settings(loss)
    selected = select_tokens(
        loss.name, old_log_prob_BT=old, advantages_BT=advantages, response_mask_BT=mask, **settings
    )
    compute_policy_loss(
        loss.name, log_prob_BT=torch.zeros(_TWO_RESPONSES, requires_grad=True), old_log_prob_BT=old,
        advantages_BT=advantages, response_mask_BT=mask, rollout_log_prob_BT=old,
        entropy_BT=torch.ones(_TWO_RESPONSES), selected_BT=selected, **settings,
    )  # fmt: skip


def _call_estimator(config: AlgorithmConfig) -> None:
    needs = get_advantage(config.adv_estimator).needs
    inputs = {
        "values_BT": torch.zeros(_TWO_RESPONSES),
        "reward_baselines_B": torch.zeros(2),
        "reward_components_BK": torch.eye(2, max(len(config.reward_components), 1)),
        "old_log_prob_BT": torch.zeros(_TWO_RESPONSES),
    }
    advantages, returns = compute_advantages(
        config.adv_estimator, token_level_rewards_BT=torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
        response_mask_BT=torch.ones(_TWO_RESPONSES, dtype=torch.bool), group_ids=["a", "a"],
        **{name: tensor for name, tensor in inputs.items() if name in needs}, gamma=config.gamma,
        lam=config.lam, norm_adv_by_std=config.norm_adv_by_std,
        whiten_advantages=config.whiten_advantages, **config.options,
    )  # fmt: skip
    require_finite(advantages=advantages, returns=returns)
