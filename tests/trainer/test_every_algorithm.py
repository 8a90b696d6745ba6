"""Each entry of each table takes a step of a real run, reached by settings alone."""

from __future__ import annotations

import math

import pytest

from quadriga.algorithms.advantages import ADVANTAGES
from quadriga.algorithms.aggregation import AGGREGATIONS
from quadriga.algorithms.kl import KL_ESTIMATORS
from quadriga.algorithms.policy_losses import POLICY_LOSSES

ACTOR = "actor_rollout_ref.actor"
RULE = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Differs from sample to sample, so that every group has signal."""
    digits = sum(map(ord, solution_str)) % 7 / 7
    return {"score": digits, "form": digits, "length": float(len(solution_str))}
'''
USER_FILE = """
from quadriga.algorithms.advantages import register_advantage
from quadriga.algorithms.policy_losses import register_policy_loss

@register_advantage("mine", formula="A = r")
def mine(token_level_rewards_BT, response_mask_BT, *, scale=1.0):
    advantages = scale * token_level_rewards_BT.sum(-1, keepdim=True) * response_mask_BT
    return advantages, advantages

@register_policy_loss("my_loss", formula="-A log p")
def my_loss(log_prob_BT, advantages_BT, response_mask_BT):
    return -advantages_BT * log_prob_BT
"""


@pytest.fixture
def step(run, tmp_path):
    """step("a=b", …) -> the metrics of one training step."""
    rule = tmp_path / "rule.py"
    rule.write_text(RULE)

    def _step(*more: str) -> dict[str, float]:
        rows = run(
            "trainer.total_training_steps=1",
            "trainer.val_before_train=false",
            f"reward.path={rule}",
            *more,
        )
        return rows[-1]

    return _step


def moved(metrics: dict[str, float]) -> bool:
    """The step changed the policy by a finite, non-zero gradient."""
    norm = metrics["actor/grad_norm"]
    return math.isfinite(norm) and norm > 0


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_advantage(step, name) -> None:
    assert moved(step(f"algorithm.adv_estimator={name}",
                      "algorithm.reward_components=[form,length]"))  # fmt: skip


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_policy_loss(step, name) -> None:
    assert moved(step(f"{ACTOR}.policy_loss.name={name}"))


@pytest.mark.parametrize("mode", sorted(AGGREGATIONS))
def test_aggregation(step, mode) -> None:
    assert moved(step(f"{ACTOR}.loss_agg_mode={mode}"))


@pytest.mark.parametrize("kind", sorted(KL_ESTIMATORS))
def test_kl_in_the_loss(step, kind) -> None:
    metrics = step(f"{ACTOR}.use_kl_loss=true", f"'{ACTOR}.kl_loss_type=\"{kind}\"'".strip("'"))
    assert math.isfinite(metrics["actor/kl_loss"])


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_rollout_correction(step, level, mode) -> None:
    metrics = step(f"algorithm.rollout_correction.level={level}",
                   f"algorithm.rollout_correction.mode={mode}")  # fmt: skip
    assert metrics["actor/importance_weight"] == pytest.approx(1.0, abs=1e-3)


def test_adaptive_kl_in_the_reward(step) -> None:
    metrics = step("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive")
    assert metrics["reward/kl_penalty"] == pytest.approx(
        0.0, abs=1e-5
    )  # the policy is the reference


def test_refilling_keeps_whole_groups_with_signal(step) -> None:
    metrics = step("algorithm.filter_groups.enable=true", "algorithm.filter_groups.mode=refill")
    assert metrics["batch/sequences"] == 16
    assert metrics["group/kept"] == 8


def test_masked_groups_leave_the_gradient_of_the_others(step) -> None:
    assert moved(step("algorithm.filter_groups.enable=true"))


def test_a_users_file_adds_an_estimator_and_a_loss(step, tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(USER_FILE)
    metrics = step(
        f"algorithm.user_files=[{file}]",
        "algorithm.adv_estimator=mine",
        "+algorithm.options.scale=2.0",
        f"{ACTOR}.policy_loss.name=my_loss",
    )
    assert moved(metrics)
