"""Invalid and conflicting settings raise `ConfigError`; the message shows the arithmetic."""

from typing import get_args

import pytest

from quadriga.config import schema
from quadriga.config.commands import ArithmeticDataConfig, EvalConfig, GenerateConfig, SFTConfig
from quadriga.config.loading import load_config
from quadriga.errors import ConfigError
from quadriga.trainer.checks import settings

N = "actor_rollout_ref.rollout.n"
ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref.engine.name"
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
SAMPLING = "actor_rollout_ref.rollout.sampling"


def error_of(check, cls, overrides, *known):
    """Return the one-line message of the `ConfigError` that loading or the check raises."""
    with pytest.raises(ConfigError) as caught:
        check(load_config(cls, overrides), *known)
    assert "\n" not in str(caught.value)
    return str(caught.value)


LOCAL = "trainer.backend=local"
TWO = ("trainer.n_gpus_per_node=2", LOCAL)
APART = ("placement.actor=[0]", "trainer.n_gpus_per_node=3", LOCAL)


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        (TWO, r"actor has 2 ranks (trainer.nnodes=1 × trainer.n_gpus_per_node=2)"),
        (
            ("placement.actor=[0-1]", "placement.rollout=[2]", *APART[1:]),
            "actor has 2 ranks (place",
        ),
        (("placement.critic=[1-2]", "algorithm.adv_estimator=gae", *APART), "critic has 2 ranks ("),
    ],
)
def test_several_local_ranks_of_a_role_that_computes_together_are_refused(overrides, ranks):
    message = error_of(settings.check_train_settings, schema.TrainConfig, overrides)
    assert ranks in message and "trainer.backend=local runs no collectives" in message


def test_local_ranks_that_need_no_collectives_pass():
    placed = ("placement.rollout=[1-2]", "data.train_batch_size=8", f"{MINI}=8")
    settings.check_train_settings(load_config(schema.TrainConfig, [*placed, *APART]))
    settings.check_train_settings(load_config(schema.TrainConfig, [LOCAL]))
    settings.check_fine_tuning_settings(load_config(SFTConfig, [LOCAL]))


def test_defaults_pass():
    settings.check_train_settings(schema.TrainConfig())
    settings.check_fine_tuning_settings(SFTConfig())
    settings.check_generate_settings(GenerateConfig())
    settings.check_values(ArithmeticDataConfig())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["data.train_batch_size=10", f"{N}=3", "trainer.n_gpus_per_node=4", f"{MINI}=10"],
            "data.train_batch_size=10 × rollout.n = 10 × 3 = 30 sequences do not divide over 4 "
            "ranks (trainer.nnodes=1 × trainer.n_gpus_per_node=4)",
        ),
        (
            ["data.train_batch_size=64", f"{MINI}=24"],
            f"{MINI}=24 does not divide data.train_batch_size=64 (64 = 2 × 24 + 16)",
        ),
        (
            ["algorithm.adv_estimator=grpo"],
            f"{N}=1 is too few, because algorithm.adv_estimator=grpo compares the responses",
        ),
        (["algorithm.filter_groups.enable=true"], "every prompt group has one response"),
        ([f"{SAMPLING}.temperature=0", f"{N}=8"], "is greedy: all n=8 responses to a prompt"),
        (
            ["algorithm.overlong.enable=true", "algorithm.overlong.buffer_length=600"],
            "buffer_length=600 is longer than data.max_response_length=512",
        ),
        (
            ["algorithm.rollout_correction.lower=3"],
            "rollout_correction.lower=3 must be below upper=2",
        ),
        (
            ["algorithm.rollout_correction.level=token", f"{ACTOR}.policy_loss.name=decoupled_ppo"],
            "level=token has the weights that actor_rollout_ref.actor.policy_loss.name=decoupled",
        ),
        (
            ["critic.optim.total_steps=5", "critic.optim.lr_warmup_steps=6"],
            "critic.optim.lr_warmup_steps=6 is more than critic.optim.total_steps=5",
        ),
        (
            [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full", f"{REF}=megatron"],
            f"needs equal engines, but {ACTOR}.engine.name=fsdp and {REF}=megatron",
        ),
        (
            ["trainer.n_gpus_per_node=4", "critic.engine.fsdp_size=3"],
            "engine.fsdp_size=3 must be -1 (all ranks) or divide the 4 ranks (4 = 1 × 3 + 1)",
        ),
        (["critic.engine.fused_head=true"], "fused_head=true is for log-probabilities, and this"),
        (
            ["actor_rollout_ref.rollout.weight_transport=collective", LOCAL],
            "weight_transport=collective needs one process group of all ranks",
        ),
        (
            ["trainer.total_training_steps=4", "critic.warmup_steps=4"],
            "critic.warmup_steps=4 leaves no step in which the actor is updated: the run has 4 "
            "steps; set it to at most 3",
        ),
        (
            ["trainer.total_training_steps=5", "critic.warmup_steps=2", f"{MINI}=32",
             f"{ACTOR}.optim.lr_warmup_steps=7"],
            f"{ACTOR}.optim.lr_warmup_steps=7 is more than the 6 optimizer steps of the run",
        ),
    ],
)  # fmt: skip
def test_conflicting_settings(overrides, words):
    assert words in error_of(settings.check_train_settings, schema.TrainConfig, overrides)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.adv_estimator=grop", "got 'grop'; did you mean grpo?"),
        ("actor_rollout_ref.actor.loss_agg_mode=token_mean", "did you mean token-mean?"),
        (f"{ACTOR}.policy_loss.name=ppo_clp", "did you mean ppo_clip?"),
        ("actor_rollout_ref.actor.kl_loss_type=k9", "k3+, low_var_kl+, full, got 'k9'"),
        ("algorithm.kl_penalty=full", "abs+, k3+, low_var_kl+, got 'full'"),
        ("actor_rollout_ref.rollout.name=vlm",
         "rollout.name must be one of hf, sglang, vllm, got 'vlm'; did you mean vllm?"),
        ("critic.engine.name=fsdp3", "did you mean fsdp?"),
        ("trainer.backend=rya",
         "trainer.backend must be one of ray, local, got 'rya'; did you mean ray"),
        ("critic.engine.reduce_dtype=auto", "must be one of float32, bfloat16, float16, got"),
    ],
)  # fmt: skip
def test_unknown_names_and_choices_name_the_nearest(override, words):
    assert words in error_of(settings.check_train_settings, schema.TrainConfig, [override])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor_rollout_ref.actor.policy_loss.clip_ratio_c=1", "clip_ratio_c must be above 1, got"),
        ("trainer.total_training_steps=0", "total_training_steps must be at least 1, got 0"),
        (f"{SAMPLING}.top_p=0", "top_p must be above 0 and at most 1, got 0"),
        ("algorithm.lam=2", "algorithm.lam must be at least 0 and at most 1, got 2"),
        ("critic.optim.betas=[0.9,1.0]", "betas[1] must be at least 0 and below 1, got 1.0"),
        ("critic.optim.lr=nan", "critic.optim.lr must be a finite number, got nan"),
        ("trainer.device_memory_gb=inf", "device_memory_gb must be a finite number, got inf"),
        ("data.seed=-1", "data.seed must be at least 0, got -1"),
    ],
)
def test_values_out_of_range(override, words):
    assert words in error_of(settings.check_train_settings, schema.TrainConfig, [override])


def test_sft_settings():
    for given, words, end in (
        (TWO, "2 ranks (trainer.nnodes=1 × trainer.n_gpus_per_node=2)", ""),
        (
            ["data.train_batch_size=7", TWO[0]],
            "data.train_batch_size=7 rows do not divide over 2 ranks",
            "set it to 6 or 8",
        ),
    ):
        message = error_of(settings.check_fine_tuning_settings, SFTConfig, given)
        assert words in message and message.endswith(end)


@pytest.mark.parametrize("setting", ["model.freeze=['*']", "model.lora.rank=2"])
def test_a_model_that_is_not_trained_has_no_adapters_and_no_frozen_weights(setting):
    words = error_of(settings.check_generate_settings, GenerateConfig, [setting])
    assert setting.rsplit("=")[0].removesuffix(".rank") in words and "is not" in words


def test_generate_settings():
    words = "n=3 greedy responses (sampling.temperature=0) would all be equal"
    assert words in error_of(settings.check_generate_settings, GenerateConfig, ["n=3"])
    settings.check_generate_settings(load_config(GenerateConfig, ["n=3", "sampling.temperature=1"]))


def test_a_settings_object_made_in_python_is_checked_too():
    config = schema.TrainConfig(trainer=schema.TrainerConfig(backend="rya"))
    with pytest.raises(ConfigError, match=r"trainer\.backend must be one of ray, local") as caught:
        settings.check_train_settings(config)
    assert caught.value.nearest == "ray"
    with pytest.raises(ConfigError, match=r"pass_at\[1\] must be"):
        settings.check_values(EvalConfig(pass_at=[1, 0]))


def test_choices_equal_the_tables_of_higher_layers():
    from quadriga.algorithms import dynamic_sampling, importance, kl
    from quadriga.algorithms.aggregation import AGGREGATIONS
    from quadriga.backends import BACKENDS
    from quadriga.engines.optimizers import SCHEDULES

    assert set(get_args(schema.LrSchedulerName)) == set(SCHEDULES)
    assert set(get_args(schema.BackendName)) == set(BACKENDS)
    assert set(get_args(schema.UnderFilled)) == set(dynamic_sampling.UNDER_FILLED)
    assert set(get_args(schema.AggregationName)) == set(AGGREGATIONS)
    assert set(get_args(schema.KLName)) == set(kl.KL_ESTIMATORS)
    assert set(get_args(schema.SampledKLName)) == set(kl.SAMPLED_ESTIMATORS)
    assert set(get_args(schema.CorrectionLevel)) == {"none", *importance.LEVELS}
    assert set(get_args(schema.CorrectionMode)) == set(importance.MODES)
