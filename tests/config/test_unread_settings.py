"""Settings that another setting leaves without effect are refused before a process starts."""

from __future__ import annotations

import pytest

from quadriga.config.checks.settings import KnownNames, check_sft_settings, check_train_settings
from quadriga.config.commands import SFTConfig
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError

KNOWN = KnownNames(estimators=frozenset({"gae"}), estimators_with_values=frozenset({"gae"}))
ACTOR = "actor_rollout_ref.actor"
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"


REWARD_MODEL = ["reward_model.enable=true", "reward_model.model.path=scorer"]


def error_of(check, cls, overrides, *known):
    with pytest.raises(ConfigError) as caught:
        check(load_config(cls, overrides), *known)
    assert caught.value.key is not None and caught.value.key in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["actor_rollout_ref.ref.engine.optimizer_offload=true"],
            "ref.engine.optimizer_offload=true has no effect: the reference policy is not trained, "
            "so it has no optimizer; remove it",
        ),
        (
            ["actor_rollout_ref.ref.engine.reduce_each_micro_batch=false"],
            "ref.engine.reduce_each_micro_batch=false has no effect: the reference policy is not "
            "trained, so it has no gradients; remove it",
        ),
        (
            ["actor_rollout_ref.ref.engine.reduce_dtype=bfloat16"],
            "ref.engine.reduce_dtype=bfloat16 has no effect: the reference policy is not trained",
        ),
        (
            [*REWARD_MODEL, "reward_model.engine.optimizer_offload=true"],
            "reward_model.engine.optimizer_offload=true has no effect: the reward model is not "
            "trained, so it has no optimizer; remove it",
        ),
        (
            [*REWARD_MODEL, "reward_model.engine.reduce_dtype=bfloat16"],
            "reward_model.engine.reduce_dtype=bfloat16 has no effect: the reward model is not",
        ),
        (
            [f"{ACTOR}.loss_scale_length=100", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum"],
            f"{ACTOR}.loss_scale_length=100 is read by {ACTOR}.loss_agg_mode=seq-mean-token-sum-"
            "norm only, but it is seq-mean-token-sum; change it, or remove loss_scale_length",
        ),
        (
            [f"{ACTOR}.engine.offload_policy=true", f"{ACTOR}.engine.optimizer_offload=true"],
            f"{ACTOR}.engine.optimizer_offload=true has no effect, because {ACTOR}.engine.offload_"
            "policy=true keeps parameters and optimizer state in host memory",
        ),
        (
            ["critic.engine.offload_policy=true", "critic.engine.param_offload=true"],
            "critic.engine.param_offload=true has no effect, because critic.engine.offload_policy",
        ),
        (
            [f"{ACTOR}.optim.total_steps=50"],
            f"{ACTOR}.optim.total_steps=50 is the length of a falling learning rate, but {ACTOR}."
            "optim.lr_scheduler=constant",
        ),
        (
            [f"{ACTOR}.shuffle=true"],
            f"{ACTOR}.shuffle=true has no effect: 64 prompts in mini-batches of 64 are one "
            "mini-batch, whose gradient does not depend on the order",
        ),
        (
            ["trainer.total_training_steps=4", "critic.warmup_steps=4"],
            "critic.warmup_steps=4 leaves no step in which the actor is updated: the run has 4 "
            "steps; set it to at most 3",
        ),
        (
            [
                "trainer.total_training_steps=5",
                "critic.warmup_steps=2",
                f"{MINI}=32",
                f"{ACTOR}.optim.lr_warmup_steps=7",
            ],
            f"{ACTOR}.optim.lr_warmup_steps=7 is more than the 6 optimizer steps of the run",
        ),
        (
            ["trainer.total_training_steps=5", "critic.optim.lr_warmup_steps=6"],
            "critic.optim.lr_warmup_steps=6 is more than the 5 optimizer steps of the run",
        ),
    ],
)
def test_a_setting_without_effect_is_named_with_the_reason(overrides, words):
    assert words in error_of(check_train_settings, TrainConfig, overrides, KNOWN)


def test_parameters_of_a_feature_that_is_off_and_a_warm_up_that_ends_pass():
    accepted = [f"{ACTOR}.kl_loss_coef=0.1", "algorithm.overlong.penalty_factor=2"]
    accepted += ["critic.warmup_steps=4", f"{ACTOR}.optim.lr_warmup_steps=1"]
    check_train_settings(
        load_config(TrainConfig, [*accepted, "trainer.total_training_steps=5"]), KNOWN
    )


def test_a_warm_up_beyond_fine_tuning_is_refused():
    steps = ["trainer.total_training_steps=5", "optim.lr_warmup_steps=6"]
    message = error_of(check_sft_settings, SFTConfig, steps)
    assert "optim.lr_warmup_steps=6 is more than the 5 optimizer steps of the run" in message
