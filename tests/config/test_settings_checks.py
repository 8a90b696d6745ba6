"""Settings that cannot be are refused with the arithmetic in the message."""

from __future__ import annotations

import pytest

from quadriga.config.checks import (
    KnownNames,
    check_data_settings,
    check_generate_settings,
    check_sft_settings,
    check_train_settings,
)
from quadriga.config.loading import load_config
from quadriga.config.ranges import CHOICES, RANGES, leaves
from quadriga.config.schema import (
    ArithmeticDataConfig,
    DemoConfig,
    GenerateConfig,
    SFTConfig,
    TrainConfig,
)
from quadriga.errors import ConfigError

KNOWN = KnownNames(
    estimators=frozenset({"gae", "grpo"}),
    estimators_with_values=frozenset({"gae"}),
    estimators_with_groups=frozenset({"grpo"}),
    policy_losses=frozenset({"ppo_clip"}),
    aggregations=frozenset({"token-mean"}),
    kl_estimators=frozenset({"k1", "k3", "full"}),
    engines=frozenset({"fsdp", "megatron"}),
    rollouts=frozenset({"hf"}),
)
N = "actor_rollout_ref.rollout.n"
ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref.engine.name"
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
SAMPLING = "actor_rollout_ref.rollout.sampling"


def refusal(check, cls, overrides, *known):
    with pytest.raises(ConfigError) as caught:
        check(load_config(cls, overrides), *known)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_pass():
    check_train_settings(TrainConfig(), KNOWN)
    check_train_settings(TrainConfig())
    check_sft_settings(SFTConfig())
    check_generate_settings(GenerateConfig())
    check_data_settings(ArithmeticDataConfig())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["data.train_batch_size=10", f"{N}=3", "trainer.n_gpus_per_node=4", f"{MINI}=10"],
            "data.train_batch_size × rollout.n = 10 × 3 = 30 sequences do not divide over 4 ranks "
            "(trainer.nnodes=1 × trainer.n_gpus_per_node=4)",
        ),
        (
            ["data.train_batch_size=64", f"{MINI}=24"],
            f"{MINI}=24 does not divide data.train_batch_size=64 (64 = 2 × 24 + 16)",
        ),
        (
            [f"{N}=2", f"{MINI}=1", "trainer.nnodes=2", "trainer.n_gpus_per_node=2"],
            f"{MINI} × rollout.n = 1 × 2 = 2 sequences do not divide over 4 ranks",
        ),
        (
            ["algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=3"],
            "critic.ppo_mini_batch_size=3 does not divide data.train_batch_size=64",
        ),
        (
            ["algorithm.adv_estimator=grpo"],
            f"algorithm.adv_estimator=grpo compares the responses of one prompt, and {N}=1",
        ),
        (["algorithm.filter_groups.enable=true"], "every group has one response"),
        ([f"{SAMPLING}.temperature=0", f"{N}=8"], "is greedy: all n=8 responses of a prompt"),
        ([f"{SAMPLING}.top_k=0"], "top_k must be -1 (all tokens) or at least 1, got 0"),
        (
            ["algorithm.adv_estimator=grpo", f"{N}=4", "critic.warmup_steps=2"],
            "critic.warmup_steps=2, but algorithm.adv_estimator=grpo has no critic",
        ),
        (
            ["algorithm.overlong.enable=true", "algorithm.overlong.buffer_length=600"],
            "buffer_length=600 is longer than data.max_response_length=512",
        ),
        (
            ["algorithm.rollout_correction.lower=3"],
            "rollout_correction.lower=3 must be below upper=2",
        ),
        (
            ["critic.optim.total_steps=5", "critic.optim.lr_warmup_steps=6"],
            "critic.optim.lr_warmup_steps=6 is more than critic.optim.total_steps=5",
        ),
        (
            ["algorithm.kl_penalty=full"],
            "algorithm.kl_penalty=full: KL in the reward has the log-probabilities of the sampled "
            "tokens and nothing else",
        ),
        (
            [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full", f"{REF}=megatron"],
            f"engines of one kind, but {ACTOR}.engine.name=fsdp and {REF}=megatron",
        ),
        (
            ["trainer.n_gpus_per_node=4", "critic.engine.fsdp_size=3"],
            "critic.engine.fsdp_size=3 must be -1 (all ranks) or divide the 4 ranks",
        ),
    ],
)
def test_settings_that_conflict(overrides, words):
    assert words in refusal(check_train_settings, TrainConfig, overrides, KNOWN)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.adv_estimator=grop", "'grop' is not known; expected one of gae, grpo; did you"),
        ("actor_rollout_ref.actor.policy_loss.name=x", "expected one of ppo_clip"),
        ("actor_rollout_ref.actor.loss_agg_mode=x", "expected one of token-mean"),
        ("critic.loss_agg_mode=x", "critic.loss_agg_mode='x'"),
        ("actor_rollout_ref.actor.kl_loss_type=k9", "expected one of full, k1, k3"),
        ("algorithm.kl_penalty=k9", "algorithm.kl_penalty='k9'"),
        ("actor_rollout_ref.rollout.name=vlm", "rollout.name='vlm'"),
        ("critic.engine.name=fsdp3", "did you mean fsdp?"),
        (f"{REF}=fsdp3", "did you mean fsdp?"),
        ("actor_rollout_ref.actor.optim.lr_scheduler=cosin", "did you mean cosine?"),
        ("trainer.backend=rya", "trainer.backend='rya' is not known; expected one of local, ray"),
        ("algorithm.kl_ctrl.type=x", "expected one of adaptive, fixed"),
    ],
)
def test_names_that_no_table_has(override, words):
    assert words in refusal(check_train_settings, TrainConfig, [override], KNOWN)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor_rollout_ref.actor.policy_loss.clip_ratio_c=1", "clip_ratio_c must be above 1, got"),
        ("trainer.total_training_steps=0", "total_training_steps must be at least 1, got 0"),
        ("trainer.total_epochs=0", "trainer.total_epochs must be at least 1, got 0"),
        (f"{SAMPLING}.top_p=0", "top_p must be above 0 and at most 1, got 0.0"),
        (f"{SAMPLING}.top_p=1.1", "top_p must be above 0 and at most 1, got 1.1"),
        ("algorithm.lam=2", "algorithm.lam must be at least 0 and at most 1, got 2.0"),
        ("critic.optim.betas=[0.9,1.0]", "betas must be at least 0 and below 1, got 1.0"),
        ("critic.optim.lr=nan", "critic.optim.lr must be at least 0, got nan"),
        ("trainer.n_gpus_per_node=0", "trainer.n_gpus_per_node must be at least 1, got 0"),
        ("data.seed=-1", "data.seed must be at least 0, got -1"),
    ],
)
def test_values_no_run_could_use(override, words):
    assert words in refusal(check_train_settings, TrainConfig, [override], KNOWN)


def test_kl_over_the_vocabulary_wants_one_kind_of_engine_only_where_it_is_read():
    kinds = [f"{ACTOR}.kl_loss_type=full", f"{REF}=megatron"]
    check_train_settings(load_config(TrainConfig, kinds), KNOWN)
    check_train_settings(load_config(TrainConfig, [f"{ACTOR}.use_kl_loss=true", kinds[0]]), KNOWN)


def test_critic_settings_do_not_matter_without_a_critic():
    config = load_config(
        TrainConfig,
        ["algorithm.adv_estimator=grpo", f"{N}=4", "critic.ppo_mini_batch_size=3"],
    )
    check_train_settings(config, KNOWN)


def test_sft():
    words = refusal(
        check_sft_settings, SFTConfig, ["data.train_batch_size=7", "trainer.n_gpus_per_node=2"]
    )
    assert "data.train_batch_size=7 rows do not divide over 2 ranks" in words
    assert words.endswith("6 or 8 would")
    words = refusal(check_sft_settings, SFTConfig, ["trainer.stop_at_accuracy=0.3"])
    assert "needs held-out prompts" in words


def test_generate():
    words = refusal(check_generate_settings, GenerateConfig, ["n=3"])
    assert "n=3 greedy answers (sampling.temperature=0) would all be the same" in words
    check_generate_settings(load_config(GenerateConfig, ["n=3", "sampling.temperature=1"]))


def test_every_range_and_choice_is_of_a_setting_that_exists():
    schemas = (TrainConfig, SFTConfig, GenerateConfig, ArithmeticDataConfig, DemoConfig)
    keys = [key for cls in schemas for key, _ in leaves(cls())]
    assert [n for n in RANGES if not any(key.split(".")[-1] == n for key in keys)] == []
    assert [n for n in CHOICES if not any(f".{key}".endswith(f".{n}") for key in keys)] == []


def test_choices_are_those_of_the_tables_above():
    from quadriga.engines.schedule import SCHEDULES

    assert set(CHOICES["lr_scheduler"]) == set(SCHEDULES)
