"""Old log-probabilities of the update itself equal those of a pass of their own."""

import pytest
import torch
from run_cases import noted, timeless
from safetensors.torch import load_file

from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError
from quadriga.protocol import DataProto
from quadriga.trainer.ppo import RayPPOTrainer
from quadriga.trainer.roles import workers as needed
from quadriga.trainer.roles.registry import Role
from quadriga.trainer.roles.workers import settings_for_classes
from quadriga.workers import ActorRolloutRefWorker

ACTOR = "actor_rollout_ref.actor"
SETTING = f"{ACTOR}.old_log_probs_from_update"
LORA = "actor_rollout_ref.model.lora"
ONE_STEP = f"{ACTOR}.ppo_mini_batch_size=null"

# Which settings choose it.


USUAL = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"]


def chosen(*overrides: str) -> bool:
    return needed.takes_old_log_probs_from_update(load_config(TrainConfig, [*USUAL, *overrides]))


def test_it_is_chosen_where_a_step_is_one_optimizer_step_and_nothing_reads_them_before() -> None:
    assert chosen()
    assert chosen("algorithm.adv_estimator=gae", f"{ACTOR}.use_kl_loss=true")
    assert not chosen(f"{ACTOR}.ppo_mini_batch_size=32")
    assert not chosen(f"{ACTOR}.ppo_epochs=2")
    assert not chosen("algorithm.use_kl_in_reward=true")
    assert chosen("trainer.max_staleness=1"), "the update corrects old responses itself"
    assert not chosen("algorithm.rollout_correction={level: token, normalise: true}")
    assert not chosen(f"{ACTOR}.policy_loss.name=clip_cov")
    assert not chosen("algorithm.adv_estimator=gae", "critic.warmup_steps=1")
    assert chosen(f"{LORA}.rank=4")
    assert not chosen(f"{LORA}.rank=4", f"{LORA}.dropout=0.1")  # of an update only
    assert not chosen(f"{SETTING}=false")


@pytest.mark.parametrize(("loss", "level"), [("ppo_clip", "token"), ("decoupled_ppo", "none")])
def test_old_responses_are_corrected_once(loss, level):
    """decoupled_ppo has the weight π_old/π_rollout itself: with a second one it is squared."""
    given = [*USUAL, f"{ACTOR}.policy_loss.name={loss}", "trainer.max_staleness=1"]
    assert needed.correction_of(load_config(TrainConfig, given)).level == level


def test_a_stage_that_reads_them_before_the_update_is_named() -> None:
    more = [f"{SETTING}=true", "algorithm.use_kl_in_reward=true"]
    config = load_config(TrainConfig, [*USUAL, *more])
    with pytest.raises(ConfigError, match="stage penalise_kl reads field 'old_log_probs'"):
        RayPPOTrainer(config)


def test_a_worker_class_with_its_own_update_gets_them_from_a_pass() -> None:
    class Own(ActorRolloutRefWorker):
        def update_actor(self, data: DataProto) -> DataProto:
            return data

    class Plain(ActorRolloutRefWorker): ...

    config = load_config(TrainConfig, ["algorithm.adv_estimator=grpo"])
    assert settings_for_classes(config, {Role.ActorRollout: Plain}) is config
    own = settings_for_classes(config, {Role.ActorRollout: Own})
    assert own.actor_rollout_ref.actor.old_log_probs_from_update is False
    assert not own.actor_rollout_ref.actor.skip_zero_advantages  # it may read them in every row
    insisting = load_config(TrainConfig, [f"{SETTING}=true"])
    own = settings_for_classes(insisting, {Role.ActorRollout: Own})
    assert own.actor_rollout_ref.actor.old_log_probs_from_update is True


# Parity.


STALE = ("trainer.max_staleness=1", "data.val_files=[]")
PAIRS = "algorithm.rollout_correction={level: sequence, mode: mask, upper: 1.05}"


@pytest.mark.parametrize(
    ("estimator", "stale"),
    [("grpo", ()), pytest.param("gae", (), marks=pytest.mark.nightly), ("grpo", (*STALE, PAIRS))],
)
def test_a_run_computes_the_same_numbers_with_one_pass_less(
    run, tmp_path, monkeypatch, rule, estimator, stale
) -> None:
    passes = []
    noted(
        monkeypatch, ActorRolloutRefWorker, "compute_log_prob", lambda *given: passes.append(given)
    )
    more = [ONE_STEP, rule, f"algorithm.adv_estimator={estimator}", f"{ACTOR}.entropy_coeff=0.01",
            f"{ACTOR}.use_kl_loss=true", *stale]  # fmt: skip
    without = run(*more)
    assert passes == []
    with_pass = run(*more, f"{SETTING}=false", f"trainer.default_local_dir={tmp_path / 'b'}")
    assert len(passes) == 2
    for ours, theirs in zip(timeless(without), timeless(with_pass), strict=True):
        # Statistics of log-probabilities: the pass returns them in float32.
        assert ours == pytest.approx(theirs, abs=2e-5)
    assert without[1]["actor/entropy"] > 1 and without[1]["mismatch/abs"] >= 0
    assert not stale or 0 < without[1]["mismatch/is_outside_fraction"] < 1
    ours, theirs = (load_file(tmp_path / f / "model" / "model.safetensors") for f in ("run", "b"))
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], atol=1e-6, rtol=0)
