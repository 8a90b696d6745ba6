"""With `rollout.take_turns` the loop frees device memory before and after each generation."""

from functools import partial

import pytest
import torch
from run_cases import noted

from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError, RolloutError
from quadriga.rollout import ROLLOUTS
from quadriga.rollout.hf import HF
from quadriga.rollout.hf.engine import HFRollout
from quadriga.trainer.roles import workers as role_workers
from quadriga.workers import ActorRolloutRefWorker

TURNS = "actor_rollout_ref.rollout.take_turns"
WATCHED = ("rollout_mode", "generate_sequences", "trainer_mode", "compute_log_prob", "update_actor",
           "sync_weights")  # fmt: skip

MEMORY = [f"memory/{mode}_mode_{moment}" for mode in ("rollout", "trainer")
          for moment in ("before", "after")]  # fmt: skip


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The worker methods that a run calls, in order."""
    seen: list[str] = []
    for name in WATCHED:
        note = partial(seen.append, name)
        noted(monkeypatch, ActorRolloutRefWorker, name, lambda *_, note=note, **__: note())
    return seen


TRAINING = ["compute_log_prob", "update_actor", "sync_weights"]


def test_the_loop_switches_around_every_generation(run, calls) -> None:
    rows = run(f"{TURNS}=true", "actor_rollout_ref.actor.use_kl_loss=true")
    turn = ["rollout_mode", "generate_sequences", "trainer_mode"]
    # Weights at the start, a validation, two steps, a validation.
    assert calls == ["sync_weights", *turn, *turn, *TRAINING, *turn, *TRAINING, *turn]
    assert len(rows) == 3
    for row in rows:
        assert all(0.05 < row[name] < 100 for name in MEMORY)


def test_a_worker_class_that_cannot_switch_is_refused(train_overrides) -> None:
    from quadriga.trainer.roles.registry import Role

    left_out = {"rollout_mode", "trainer_mode", "__dict__", "__weakref__"}
    methods = {k: v for k, v in vars(ActorRolloutRefWorker).items() if k not in left_out}
    Fixed = type("Fixed", ActorRolloutRefWorker.__bases__, methods)
    workers, mapping = {"actor_rollout": ["actor", "rollout"]}, {Role.ActorRollout: Fixed}
    config = load_config(TrainConfig, train_overrides)
    role_workers.worker_classes(config, workers, 1, mapping)
    config = load_config(TrainConfig, [*train_overrides, f"{TURNS}=true"])
    with pytest.raises(ConfigError, match="calls rollout_mode, trainer_mode, but Fixed has no"):
        role_workers.worker_classes(config, workers, 1, mapping)


class Dropping(HFRollout):
    """An engine whose weights are gone after a release, as in vLLM's sleep level 2."""

    updates = 0

    def __init__(self, *settings):
        super().__init__(*settings)
        self.lacking: set[str] = set()

    def release(self):
        super().release()
        with torch.no_grad():
            for tensor in self.module.state_dict().values():
                tensor.zero_()
        self.lacking = set(self.module.state_dict())

    def lacks_weights(self):
        return bool(self.lacking)

    def update_weights(self, stream, version):
        Dropping.updates += 1
        weights = dict(stream)
        super().update_weights(weights.items(), version)
        self.lacking -= set(weights)

    def generate(self, *request):
        if self.lacking:
            raise RolloutError(f"{min(self.lacking)} was not sent")
        return super().generate(*request)


class DroppingKind(HF):
    def build(self, model, device, **others):
        return Dropping(self, model, device)


def test_weights_that_a_release_dropped_are_sent_again(run, tmp_path, monkeypatch):
    """Taking turns then changes no number."""
    monkeypatch.setitem(ROLLOUTS, "dropping", DroppingKind)
    monkeypatch.setattr(Dropping, "updates", 0)
    given = ("algorithm.adv_estimator=gae", "critic.warmup_steps=1",
             "trainer.total_training_steps=3")  # fmt: skip
    plain = run(*given)
    dropped = run(*given, f"{TURNS}=true", "actor_rollout_ref.rollout.name=dropping",
                  f"trainer.default_local_dir={tmp_path / 'dropped'}")  # fmt: skip
    names = ("reward/mean", "actor/loss", "critic/loss", "val/score", "mismatch/max")
    for ours, theirs in zip(plain, dropped, strict=True):
        assert [ours.get(name) for name in names] == [theirs.get(name) for name in names]
    # At the start, after two updates, and before two generations that no sync precedes: the
    # first step, and the second, because the first one updates the critic only.
    assert Dropping.updates == 5
