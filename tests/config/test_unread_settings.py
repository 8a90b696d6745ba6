"""Settings that another setting leaves without effect are logged in one line, with the reason."""

from __future__ import annotations

import logging

import pytest

from quadriga.config.commands import EvalConfig, SFTConfig
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.trainer.checks.settings import check_train_settings
from quadriga.trainer.checks.unread import unread_settings, warn_of_unread

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref.engine"
KL = f"{ACTOR}.use_kl_loss=true"
CRITIC = "critic.model.gradient_checkpointing=true"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([KL, f"{REF}.reduce_dtype=bfloat16"], f"{REF}.reduce_dtype=bfloat16 (this model is not"),
        ([f"{ACTOR}.loss_scale_length=100"], f"loss_scale_length=100 ({ACTOR}.loss_agg_mode=token"),
        (
            [f"{ACTOR}.optim.min_lr_ratio=0.1"],
            f"min_lr_ratio=0.1 ({ACTOR}.optim.lr_sch",
        ),
        ([f"{ACTOR}.optim.momentum=0.9"], f"momentum=0.9 ({ACTOR}.optim.name=adamw)"),
        ([f"{ACTOR}.shuffle=true"], "shuffle=true (a step is one mini-batch)"),
        (["data.sampler.options={a: 1}"], "data.sampler.options={a:1} (data.sampler.path is null)"),
        (
            ["actor_rollout_ref.rollout.replicas.restarts=2"],
            "replicas.restarts=2 (actor_rollout_ref.rollout.replicas.enable=false)",
        ),
        ([CRITIC], "gradient_checkpointing=true (critic.model.path is empty"),
    ],
)
def test_a_setting_without_effect_is_named_with_the_reason(overrides, words):
    config = load_config(TrainConfig, overrides)
    check_train_settings(config)
    (found,) = unread_settings(config)
    assert words in found


def test_settings_that_are_read_and_parameters_of_a_feature_that_is_off_are_not_named():
    given = [
        f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.optim.min_lr_ratio=0.1", CRITIC,
        f"{ACTOR}.optim.lr_scheduler=linear", "actor_rollout_ref.model.gradient_checkpointing=true",
    ]  # fmt: skip
    assert list(unread_settings(load_config(TrainConfig, given))) == []
    assert list(unread_settings(TrainConfig())) == []
    assert list(unread_settings(load_config(SFTConfig, ["data.val_files=[a.jsonl]"]))) == []


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_offloads_are_named_on_a_cpu_only(device):
    given = [
        f"{ACTOR}.engine.param_offload=true", "actor_rollout_ref.rollout.take_turns=true",
        "critic.engine.optimizer_offload=true", f"trainer.device={device}",
    ]  # fmt: skip
    config = load_config(TrainConfig, given)  # with a critic, and without a reference
    named = {text.partition("=")[0] for text in unread_settings(config)}
    assert named == ({key.partition("=")[0] for key in given[:3]} if device == "cpu" else set())


def test_one_line_names_all(caplog):
    config = load_config(EvalConfig, ["response_files=[a.jsonl]", "n=4", "sampling.top_p=0.9"])
    with caplog.at_level(logging.WARNING):
        warn_of_unread(config)
    (record,) = caplog.records
    reason = "(response_files holds the responses already)"
    assert record.getMessage() == (
        f"settings without effect: n=4 {reason}; sampling.top_p=0.9 {reason}"
    )
