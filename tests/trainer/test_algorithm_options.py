"""Options of the policy loss and of the estimator are checked before anything starts."""

import pytest

from quadriga.algorithms.policy_losses import POLICY_LOSSES
from quadriga.algorithms.user_files import load_user_file
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError
from quadriga.trainer.preflight import check_settings

LOSS = "actor_rollout_ref.actor.policy_loss"


def check(*overrides: str) -> None:
    given = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", *overrides]
    check_settings(load_config(TrainConfig, given))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{LOSS}.options={{tau_pos: 2}}"],
         f"{LOSS}.options: {LOSS}.name=ppo_clip does not take tau_pos=2: .*reads no setting"),
        ([f"{LOSS}.name=sapo", f"{LOSS}.options={{tau_pos: abc}}"],
         f"{LOSS}.name=sapo does not take tau_pos=abc: .*not supported"),
        ([f"{LOSS}.name=kl_cov", f"{LOSS}.options={{kl_cov_ratio: 7}}"], "is a fraction of the"),
        ([f"{LOSS}.options={{clip_ratio_low: 0.1}}"],
         f"{LOSS}.options.clip_ratio_low=0.1 is a setting of its own; set {LOSS}.clip_ratio_low"),
        (["algorithm.options={gamma: 0.9}"],
         "algorithm.options.gamma=0.9 is a setting of its own; set algorithm.gamma"),
        (["algorithm.options={x: 1}"], "algorithm.adv_estimator=grpo does not take x=1: "),
        (["algorithm.adv_estimator=gpg", "algorithm.options={f_norm: a}"], "not take f_norm=a: "),
        (["algorithm.adv_estimator=gdpo", "algorithm.reward_components=[a, b]",
          "algorithm.options={reward_weights: [1.0]}"], "does not take reward_weights="),
        ([f"{LOSS}.name=sapo", f"{LOSS}.options={{tau_pos: nan}}"], "tau_pos=nan: nan is no numb"),
        ([f"{LOSS}.name=sapo", f"{LOSS}.options={{tau_neg: inf}}"], "above 0 and finite"),
        ([f"{LOSS}.name=clip_cov", f"{LOSS}.options={{clip_cov_lb: 5, clip_cov_ub: 1}}"],
         "no covariance is between them"),
        (["algorithm.adv_estimator=gpg", "algorithm.options={f_norm: inf}"], "above 0 and finite"),
    ],
)  # fmt: skip
def test_options_that_a_function_does_not_take_are_refused(overrides, message) -> None:
    with pytest.raises(ConfigError, match=message):
        check(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{LOSS}.name=kl_cov", f"{LOSS}.options={{kl_cov_ratio: 0.1}}"],
        ["algorithm.adv_estimator=gpg", "algorithm.options={f_norm: 2.0}"],
        ["algorithm.adv_estimator=gdpo", "algorithm.reward_components=[a, b, c]",
         "algorithm.options={reward_weights: [1.0, 0.5, 0.1]}"],
    ],
)  # fmt: skip
def test_options_that_a_function_takes_are_accepted(overrides) -> None:
    check(*overrides)


USER_LOSS = """
from quadriga.algorithms.policy_losses import register_policy_loss


@register_policy_loss("scaled", formula="−c A log π", aggregation="token-mean")
def scaled(log_prob_BT, advantages_BT, *, factor=1.0):
    if factor > 3:
        raise ValueError("factor must be at most 3")
    return -factor * advantages_BT * log_prob_BT
"""


@pytest.fixture
def user_file(tmp_path):
    """A file with the loss "scaled", which is removed after the test."""
    (tmp_path / "mine.py").write_text(USER_LOSS)
    yield f"algorithm.user_files=[{tmp_path / 'mine.py'}]"
    POLICY_LOSSES.pop("scaled", None)


def test_options_of_a_loss_of_the_user_are_checked(user_file) -> None:
    load_user_file(load_config(TrainConfig, [user_file]).algorithm.user_files[0])
    check(f"{LOSS}.name=scaled", f"{LOSS}.options={{factor: 2}}")
    with pytest.raises(ConfigError, match=r"factor=4: .*factor must be at most 3"):
        check(f"{LOSS}.name=scaled", f"{LOSS}.options={{factor: 4}}")
