"""verl's classes of settings, as arguments of estimators and losses."""

import pickle

import pytest
import torch

import quadriga.compat.verl  # noqa: F401 - provides the modules of verl
from quadriga.errors import ConfigError

OLD = torch.tensor([[-1.0, -2.0]])
NEW = torch.tensor([[-0.5, -2.0]])  # ratios 1.6487 and 1
ONES = torch.ones(1, 2)


def test_settings_are_attributes_and_keys():
    from verl.trainer.config import AlgoConfig
    from verl.workers.config import ActorConfig, FSDPActorConfig, PolicyLossConfig

    config = AlgoConfig(gamma=0.9)
    assert (config.gamma, config["lam"], config.get("nothing", 3)) == (0.9, 1.0, 3)
    assert config.kl_ctrl.type == "fixed"
    assert "gamma" in config and "gamma=0.9" in repr(config)
    assert isinstance(FSDPActorConfig(), ActorConfig)
    first, second = ActorConfig(), ActorConfig(policy_loss=PolicyLossConfig(loss_mode="gspo"))
    first.global_batch_info["dp_size"] = 2  # as an actor of verl does
    assert second.global_batch_info == {}
    assert pickle.loads(pickle.dumps(second)).policy_loss.loss_mode == "gspo"


def test_an_unknown_setting_is_named():
    from verl.workers.config import ActorConfig

    with pytest.raises(ConfigError, match=r"no setting 'clip_ration'\. Did you mean clip_ratio\?"):
        ActorConfig(clip_ration=0.3)


def test_a_loss_reads_its_settings():
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla
    from verl.workers.config import ActorConfig

    def loss(**settings):
        config = ActorConfig(strategy="fsdp", rollout_n=1, **settings)
        return compute_policy_loss_vanilla(OLD, NEW, ONES, ONES, config=config)[0].item()

    assert loss() == pytest.approx(-(1.2 + 1) / 2)  # the ratio is bounded by 1 + 0.2
    assert loss(clip_ratio_high=0.5) == pytest.approx(-(1.5 + 1) / 2)
    counts = {"dp_size": 2, "batch_num_tokens": 4}
    assert loss(global_batch_info=counts) == pytest.approx(-2 * (1.2 + 1) / 4)
