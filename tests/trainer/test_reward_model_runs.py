"""Runs with a reward model: its part of the reward, its place, and settings that do not fit."""

import pytest
import torch
from run_cases import timeless
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import ModelError
from quadriga.trainer.checks.memory import train_plan
from quadriga.trainer.preflight import check_train_config


@pytest.fixture(scope="session")
def scorer(tiny_task):
    """A reward model of random weights with the tokenizer of the policy."""
    folder = tiny_task.folder / "scorer"
    tokenizer = AutoTokenizer.from_pretrained(tiny_task.model)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, num_labels=1,
        pad_token_id=tokenizer.pad_token_id, initializer_range=0.3,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture
def with_model(scorer):
    return ("reward_model.enable=true", f"reward_model.model.path={scorer}")


def steps(metrics):
    return [row for row in timeless(metrics) if "reward/model" in row]


def test_the_reward_is_the_weighted_sum_of_rules_and_model(run, with_model):
    first, second = steps(run(*with_model, "reward_model.weight=0.5", "reward_model.rule_weight=2"))
    for row in (first, second):
        assert row["reward/model"] != 0
        expected = 2 * row["reward/rules"] + 0.5 * row["reward/model"]
        assert row["reward/mean"] == pytest.approx(expected, abs=1e-6)
    assert first["actor/grad_norm"] > 0  # the rules alone give a random model no signal


@pytest.mark.parametrize(
    "more",
    [
        ("algorithm.filter_groups.enable=true",),
        ("algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=1"),
        ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.mode=refill"),
    ],
)
def test_each_place_where_responses_are_scored_has_the_model(run, with_model, more):
    assert all(row["reward/model"] for row in steps(run(*with_model, *more)))


FIVE_ROLES = (
    "algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true",
    "critic.optim.lr=1e-3", "trainer.total_training_steps=3", "reward_model.rule_weight=0.5",
)  # fmt: skip
POOLS_OF_THEIR_OWN = (
    "trainer.n_gpus_per_node=5", "placement.actor=[0]", "placement.rollout=[1]",
    "placement.ref=[2]", "placement.critic=[3]", "placement.reward_model=[4]",
)  # fmt: skip


@pytest.mark.nightly
def test_five_roles_on_pools_of_their_own_give_the_numbers_of_one_pool(
    run, with_model, rule, tmp_path
):
    given = (*with_model, *FIVE_ROLES, rule)
    one = timeless(run(*given, f"trainer.default_local_dir={tmp_path / 'one'}"))
    assert len(steps(one)) == 3
    for name in ("actor/kl_loss", "critic/loss", "reward/model", "reward/rules", "actor/grad_norm"):
        assert any(row.get(name) for row in one), name  # each role has a part in the numbers
    assert timeless(run(*given, *POOLS_OF_THEIR_OWN)) == one


def test_a_model_without_a_head_is_refused_before_start(train_overrides, tiny_task):
    model = ("reward_model.enable=true", f"reward_model.model.path={tiny_task.model}")
    with pytest.raises(ModelError, match="has no head: a reward model is a sequence classifier"):
        check_train_config(load_config(TrainConfig, [*train_overrides, *model]))


def test_the_memory_plan_has_the_reward_model(train_overrides, with_model):
    config = load_config(TrainConfig, [*train_overrides, *with_model])
    (pool,) = train_plan(config, "cpu").pools
    engine = pool.engines["reward_model"]
    assert engine.held["parameters"] > 0 and "optimizer states" not in engine.held
    assert "scores" in pool.phases
    few = [*train_overrides, *with_model, "reward_model.micro_batch_size_per_gpu=1"]
    (pool,) = train_plan(load_config(TrainConfig, few), "cpu").pools
    assert pool.engines["reward_model"].peak("evaluate") < engine.peak("evaluate")
