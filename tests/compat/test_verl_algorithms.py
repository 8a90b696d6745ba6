"""verl's algorithm functions return the numbers of `quadriga.algorithms`."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import quadriga.compat.verl  # noqa: F401 - provides the modules of verl
from quadriga.algorithms.advantages import ADVANTAGES, compute_advantages
from quadriga.compat.verl.config import ActorConfig, PolicyLossConfig
from quadriga.compat.verl.core_algos import ADV_ESTIMATOR_REGISTRY
from quadriga.errors import UnknownNameError

REWARDS = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.5, 0.0, 0.0], [0.0, 0.0, 2.0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]])
INDEX = np.array(["p", "p", "q", "q"], dtype=object)


def test_epsilon_is_added_to_the_standard_deviation():
    """Rewards 1 0 and 0.5 2: standard deviations √0.5 and √1.125."""
    from verl.trainer.ppo import core_algos

    half, more = 0.5 / (0.5**0.5 + 0.5), 0.75 / (1.125**0.5 + 0.5)
    for function in (
        core_algos.compute_grpo_outcome_advantage,
        core_algos.compute_grpo_vectorized_outcome_advantage,
    ):
        adv, returns = function(REWARDS, MASK, INDEX, epsilon=0.5)
        assert torch.allclose(adv[:, 0], torch.tensor([half, -half, -more, more]))
        assert torch.equal(adv, returns) and torch.equal(adv != 0, MASK.bool())
    best, _ = core_algos.compute_grpo_passk_outcome_advantage(REWARDS, MASK, INDEX, epsilon=0.5)
    assert torch.allclose(best[:, 0], torch.tensor([2 * half, 0.0, 0.0, 2 * more]))
    plain, _ = core_algos.compute_grpo_outcome_advantage(
        REWARDS, MASK, INDEX, epsilon=0.5, norm_adv_by_std_in_grpo=False
    )
    assert plain[:, 0].tolist() == [0.5, -0.5, -0.75, 0.75]


@pytest.mark.parametrize("name", sorted(ADV_ESTIMATOR_REGISTRY.keys() - {"gae", "gdpo"}))
def test_a_batch_with_rewards_of_greedy_responses(name):
    """`compute_advantage` passes `reward_baselines` to every estimator but GAE and GRPO."""
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    baselines = torch.tensor([0.25, 0.25, 1.0, 1.0])
    data = DataProto.from_dict(
        {"token_level_rewards": REWARDS, "response_mask": MASK, "reward_baselines": baselines},
        {"uid": INDEX},
    )
    advantages = compute_advantage(data, name, config={"gamma": 1.0}).batch["advantages"]
    assert advantages[0, 0] > 0 and not advantages[MASK == 0].any()


def test_an_estimator_with_verls_signature_works_in_quadrigas_trainer():
    from verl.trainer.ppo.core_algos import register_adv_est

    @register_adv_est("mine")
    def mine(token_level_rewards, response_mask, index, config=None, **kwargs):
        """Reward times the number of the prompt group, times γ."""
        assert (config.adv_estimator, config.get("norm_adv_by_std_in_grpo")) == ("mine", True)
        scores = (token_level_rewards * response_mask).sum(-1) * torch.as_tensor(index)
        advantages = config.gamma * scores[:, None] * response_mask
        return advantages, advantages

    try:
        adv, _ = compute_advantages(
            "mine", token_level_rewards_BT=REWARDS, response_mask_BT=MASK, group_ids=INDEX
        )
        assert adv[:, 0].tolist() == [0.0, 0.0, 0.5, 2.0]
        half, _ = compute_advantages(
            "mine", token_level_rewards_BT=REWARDS, response_mask_BT=MASK, group_ids=INDEX,
            gamma=0.5, lam=0.9, norm_adv_by_std=True,
        )  # fmt: skip
        assert torch.equal(half, adv / 2)
    finally:
        del ADVANTAGES["mine"], ADV_ESTIMATOR_REGISTRY["mine"]


def test_losses_and_kl():
    from verl.trainer.ppo import core_algos

    loss = torch.tensor([[1.0, 3.0], [5.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 0]])
    assert core_algos.agg_loss(loss, mask, "token-mean").item() == pytest.approx(3.0)
    assert core_algos.agg_loss(loss, mask, "seq-mean-token-mean").item() == pytest.approx(3.5)
    half = core_algos.agg_loss(loss, mask, "token-mean", dp_size=2, batch_num_tokens=6)
    assert half.item() == pytest.approx(3.0)
    kl = core_algos.kl_penalty(torch.tensor([[0.5]]), torch.tensor([[0.2]]), "kl")
    assert kl.item() == pytest.approx(0.3)
    control = core_algos.get_kl_controller(
        SimpleNamespace(type="adaptive", kl_coef=0.1, target_kl=1.0, horizon=100)
    )
    control.update(2.0, 10)
    assert control.value == pytest.approx(0.1 * 1.02)
    value, clipped = core_algos.compute_value_loss(
        torch.tensor([[2.0]]), torch.tensor([[0.0]]), torch.tensor([[0.0]]),
        torch.tensor([[1]]), cliprange_value=0.5,
    )  # fmt: skip
    assert (value.item(), clipped.item()) == (2.0, 0.0)
    zero, one = torch.zeros(1, 1), torch.ones(1, 1)
    share, _ = core_algos.compute_value_loss(2 * one, zero, zero, one, 0.5, "token-mean", 2, 4)
    assert share.item() == pytest.approx(1.0)  # 2 ranks with 4 tokens together


OLD = torch.tensor([[-1.0, -2.0, -0.5], [-0.7, -1.2, -3.0]])
NEW = torch.tensor([[-0.8, -2.5, -0.5], [-0.9, -0.6, -9.0]])
ADV = torch.tensor([[1.0, 1.0, 1.0], [-2.0, -2.0, 0.0]])
SEEN = torch.tensor([[1, 1, 1], [1, 1, 0]])


CONFIG = ActorConfig(
    clip_ratio_low=None, clip_ratio_high=None,
    policy_loss=PolicyLossConfig(clip_cov_ratio=0.2, kl_cov_ratio=0.3, ppo_kl_coef=1.0),
)  # fmt: skip


def test_the_clipped_policy_loss_by_hand():
    """Ratios e^0.2, e^-0.5, 1 and e^-0.2, e^0.6; clipped to [0.8, 1.2]."""
    from verl.trainer.ppo import core_algos

    loss, metrics = core_algos.get_policy_loss_fn("vanilla")(
        OLD, NEW, ADV, SEEN, "token-mean", CONFIG
    )
    terms = [-1.2, -math.exp(-0.5), -1.0, 2 * math.exp(-0.2), 2 * math.exp(0.6)]
    assert loss.item() == pytest.approx(sum(terms) / 5)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(1 / 5)
    assert metrics["actor/ppo_kl"] == pytest.approx(-(0.2 - 0.5 + 0.0 - 0.2 + 0.6) / 5)
    older = core_algos.compute_policy_loss(OLD, NEW, ADV, SEEN, cliprange=0.2)
    assert [round(value.item(), 6) for value in older] == [
        round(loss.item(), 6), *(round(metrics[f"actor/{m}"], 6) for m in
                                 ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")),
    ]  # fmt: skip


def test_every_policy_loss_has_a_verl_name():
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn

    from quadriga.algorithms.policy_losses import ALIASES, POLICY_LOSSES

    ours = {name for name, entry in POLICY_LOSSES.items() if entry.origin == "built-in"}
    named = {ALIASES.get(name, name) for name in POLICY_LOSS_REGISTRY}
    # verl calls gspo_token "gspo" and does not have the other two.
    assert ours - named == {"gspo_token", "policy_gradient", "decoupled_ppo"}
    for name, function in POLICY_LOSS_REGISTRY.items():
        log_prob = NEW.clone().requires_grad_()
        loss, metrics = function(OLD, log_prob, ADV, SEEN, "token-mean", CONFIG)
        loss.backward()
        assert torch.isfinite(log_prob.grad).all() and log_prob.grad[1, 2] == 0, name
        assert all(key.startswith("actor/") for key in metrics)
    with pytest.raises(UnknownNameError, match=r"No policy loss 'theirs'\. Known: vanilla"):
        get_policy_loss_fn("theirs")
