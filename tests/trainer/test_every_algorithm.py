"""Every entry of every registry takes a step of a real run; settings alone select it.

`test_dataflow` runs such a step with each kind of estimator and loss, `test_runs` one with those of
a file of the user.
"""

import math

import pytest
from run_cases import often

from quadriga.algorithms.advantages import ADVANTAGES
from quadriga.algorithms.policy_losses import POLICY_LOSSES

ACTOR = "actor_rollout_ref.actor"


@pytest.fixture
def step(run, rule):
    """step("a=b", …) runs one training step and returns its metrics."""

    def _step(*more: str) -> dict[str, float]:
        rows = run("trainer.total_training_steps=1", "trainer.val_before_train=false", rule, *more)
        return rows[-1]

    return _step


def moved(metrics: dict[str, float]) -> bool:
    """Return whether the gradient of the step is finite and not zero."""
    norm = metrics["actor/grad_norm"]
    return math.isfinite(norm) and norm > 0


@pytest.mark.parametrize("name", often(sorted(ADVANTAGES)))
def test_every_advantage_estimator_trains(step, name) -> None:
    assert moved(step(f"algorithm.adv_estimator={name}",
                      "algorithm.reward_components=[form,length]"))  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.adv_estimator=dr_grpo", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
         f"{ACTOR}.loss_scale_length=20"],
        ["algorithm.adv_estimator=gdpo", "algorithm.reward_components=[form,length]",
         "+algorithm.options.reward_weights=[1.0,0.5]", "algorithm.whiten_advantages=false"],
        ["algorithm.adv_estimator=gpg", "+algorithm.options.f_norm=2.0",
         f"{ACTOR}.policy_loss.name=gpg"],
        ["algorithm.adv_estimator=gae", "critic.cliprange_value=null", "algorithm.lam=0.9",
         "algorithm.reward_clip=0.5", "algorithm.whiten_rewards=true"],
        [f"{ACTOR}.policy_loss.name=kl_cov", f"+{ACTOR}.policy_loss.options.kl_cov_ratio=0.1",
         f"{ACTOR}.entropy_coeff=0.01"],
        [f"{ACTOR}.policy_loss.name=gspo", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
         f"{ACTOR}.policy_loss.clip_ratio_low=3e-4", f"{ACTOR}.ppo_epochs=2"],
    ],
    ids=["dr_grpo", "gdpo", "gpg", "gae", "kl_cov", "gspo"],
)  # fmt: skip
def test_algorithms_train_with_the_settings_of_their_papers(step, overrides) -> None:
    assert moved(step(*overrides))


@pytest.mark.parametrize("name", often(sorted(POLICY_LOSSES), "gspo"))
def test_every_policy_loss_trains(step, name) -> None:
    assert moved(step(f"{ACTOR}.policy_loss.name={name}"))


@pytest.mark.nightly
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_every_rollout_correction_has_weight_one_without_mismatch(step, level, mode) -> None:
    metrics = step(f"algorithm.rollout_correction.level={level}",
                   f"algorithm.rollout_correction.mode={mode}")  # fmt: skip
    assert metrics["actor/importance_weight"] == pytest.approx(1.0, abs=1e-3)
