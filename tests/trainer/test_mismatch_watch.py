"""The alarm for rollout and training log-probabilities that differ."""

import logging
import math

import pytest

from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import MismatchError
from quadriga.rollout.hf.engine import HFRollout
from quadriga.trainer.ppo import MismatchWatch

ROLLOUT = "actor_rollout_ref.rollout"
MISMATCH = f"{ROLLOUT}.mismatch"
ONE_STEP = "actor_rollout_ref.actor.ppo_mini_batch_size=null"


def watch(*overrides: str) -> MismatchWatch:
    return MismatchWatch(load_config(TrainConfig, overrides))


def beyond(share: float) -> dict[str, float]:
    return {"mismatch/beyond": share}


def test_the_warnings_of_a_run_are_the_first_and_the_10th_and_the_100th_alarm(caplog) -> None:
    watching = watch()
    with caplog.at_level(logging.WARNING):
        for step in range(1, 151):
            watching.check(step, beyond(0.06))
    shown = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in shown] == ["step 1", "step 10", "step 100"]
    assert "for 6.0% of the response tokens" in shown[0]
    assert "by more than 0.5 nats (actor_rollout_ref.rollout.mismatch.bound)" in shown[0]
    assert "on_alarm=fail" in shown[0]


def test_the_message_names_what_to_try() -> None:
    with pytest.raises(MismatchError) as caught:
        watch(f"{MISMATCH}.on_alarm=fail", f"{ROLLOUT}.dtype=bfloat16").check(3, beyond(0.06))
    assert "equal dtypes (actor_rollout_ref.rollout.dtype=bfloat16, actor" in str(caught.value)
    assert "rollout_correction.level=token" in str(caught.value)


# In runs: the rollout reports log-probabilities that are shifted by a known number. The rewards
# differ, because rows whose advantages are 0 are not computed, and so not compared.


@pytest.fixture
def train_overrides(train_overrides, rule) -> list[str]:
    return [*train_overrides, rule]


@pytest.fixture
def shifted(monkeypatch):
    """shifted(x) adds x to the rollout log-probabilities of every second token."""

    def by(amount: float) -> None:
        generate = HFRollout.generate

        def perturbed(self, *args, **kwargs):
            out = generate(self, *args, **kwargs)
            log_probs = out.rollout_log_probs
            log_probs[:, ::2] += amount * out.response_mask[:, ::2]
            return out

        monkeypatch.setattr(HFRollout, "generate", perturbed)

    return by


@pytest.mark.parametrize("more", [[], [ONE_STEP]], ids=["pass", "update"])
def test_shifted_log_probs_have_the_metrics_of_the_shift(run, shifted, more) -> None:
    """With and without a pass over the old log-probabilities, of one optimizer step."""
    shifted(-0.75)
    row = run(*more, "trainer.total_training_steps=1")[-1]
    share = row["mismatch/beyond"]
    assert 0.45 < share < 0.75  # responses of an odd length have one more token that is shifted
    assert row["mismatch/abs"] == pytest.approx(0.75 * share, abs=1e-4)
    assert row["mismatch/max"] == pytest.approx(0.75, abs=1e-4)
    assert row["mismatch/k3"] == pytest.approx(share * (math.exp(0.75) - 1 - 0.75), abs=1e-3)
    assert row["mismatch/correlation"] < 0.99


def test_a_run_that_must_fail_keeps_the_metrics_of_the_step_and_saves_no_checkpoint(
    run, shifted, tmp_path
) -> None:
    from quadriga.observability.jsonl import read_jsonl

    shifted(2.0)
    with pytest.raises(MismatchError, match="step 1: for"):
        run(f"{MISMATCH}.on_alarm=fail", "trainer.save_freq=1")
    rows = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert rows[-1]["step"] == 1 and rows[-1]["mismatch/beyond"] > 0.4
    assert not (tmp_path / "run" / "checkpoints").exists()
