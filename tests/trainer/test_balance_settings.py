"""From the settings of a run to the order of its rows."""

import json
import shutil

import numpy as np
import pytest

from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import ModelError
from quadriga.parallel.balancing import Balance
from quadriga.parallel.costs import TOKENS
from quadriga.trainer.dataflow import StepPlan, balance_of

ACTOR = "actor_rollout_ref.actor"


@pytest.fixture
def balance(tiny_task):
    """balance("a=b", …, ranks=2) returns the balance of a run with 8 prompts of 4 responses."""

    def _balance(*more: str, ranks: int = 2) -> Balance:
        usual = [f"actor_rollout_ref.model.path={tiny_task.model}", "data.train_batch_size=8",
                 "actor_rollout_ref.rollout.n=4", "algorithm.adv_estimator=grpo",
                 "trainer.device=cpu"]  # fmt: skip
        config = load_config(TrainConfig, [*usual, *more])
        return balance_of(config, StepPlan.of(config), ranks)

    return _balance


def test_whole_groups_are_balanced_by_the_cost_of_the_model(balance) -> None:
    found = balance()
    assert found.enabled and found.whole_groups and found.shares_prompts and found.skips
    assert found.cost.attention and found.cost.output > 0 and found.cost.prompt_attention_once
    assert balance("trainer.device=cuda").cost.prompt_attention_once
    sdpa = "actor_rollout_ref.actor.engine.attention=sdpa"
    assert not balance("trainer.device=cuda", sdpa).cost.prompt_attention_once


def test_settings_choose_sequences_or_no_balance(balance) -> None:
    sequences = balance("trainer.balance_groups=false")
    assert sequences.shares_prompts and not sequences.whole_groups
    assert not balance("trainer.balance_batch=false").enabled
    every_row = balance(f"{ACTOR}.skip_zero_advantages=false")
    assert not every_row.masked and not every_row.skips
    masked = balance(f"{ACTOR}.use_kl_loss=true", "algorithm.filter_groups.enable=true")
    assert masked.masked and not masked.skips


def test_a_model_that_cannot_be_packed_balances_sequences(balance, tiny_task, tmp_path) -> None:
    model = shutil.copytree(tiny_task.model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "stablelm"}))
    found = balance(f"actor_rollout_ref.model.path={model}")
    assert not found.shares_prompts and not found.whole_groups


def test_each_mini_batch_is_balanced_by_itself(balance) -> None:
    assert balance().mini_batch_rows == 32
    assert balance(f"{ACTOR}.ppo_mini_batch_size=4").mini_batch_rows == 16
    # With shuffle, a rank draws its mini-batches anew in each epoch.
    assert (
        balance(f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.shuffle=true").mini_batch_rows is None
    )


def test_the_mini_batches_of_the_critic_consist_of_the_same_units(balance) -> None:
    """12 prompts; the actor takes 4 and the critic 6 per optimizer step."""
    more = ["data.train_batch_size=12", f"{ACTOR}.ppo_mini_batch_size=4",
            "critic.ppo_mini_batch_size=6"]  # fmt: skip
    assert balance(*more, "algorithm.adv_estimator=gae").mini_batch_rows == 2 * 4
    assert balance(*more).mini_batch_rows == 4 * 4, "grpo has no critic"
    uneven = balance(*more, "algorithm.adv_estimator=gae", ranks=16)
    assert uneven.mini_batch_rows == 4 * 4, "8 rows do not divide over 16 ranks"


def test_one_rank_and_a_worker_with_a_model_of_its_own_need_no_model_folder(balance) -> None:
    missing = "actor_rollout_ref.model.path=missing"
    assert balance(missing, ranks=1).ranks == 1
    assert balance("actor_rollout_ref.model.path=''").cost is TOKENS
    with pytest.raises(ModelError, match="missing"):
        balance(missing)


def test_the_imbalance_adds_up_the_slowest_ranks_of_the_mini_batches() -> None:
    """Costs 20 and 12 in the first mini-batch, 12 and 16 in the second one: 36 / (16 + 14)."""
    prompt, response = np.full(4, 1), np.array([19, 11, 11, 15])
    arranged = Balance(2, mini_batch_rows=2).arrange(
        ["a", "b", "c", "d"], prompt, response, np.ones(4, dtype=bool)
    )
    assert arranged.metrics()["batch/cost_imbalance"] == pytest.approx(36 / 30)
