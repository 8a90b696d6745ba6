"""Updates and passes without gradients keep the limits of the settings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quadriga.config.schema import (
    ActorConfig,
    ActorRolloutRefConfig,
    CriticConfig,
    EngineConfig,
    RefConfig,
    RewardModelConfig,
)
from quadriga.protocol import DataProto, fields
from quadriga.workers.actor_rollout_ref import ActorRolloutRefWorker
from quadriga.workers.reward_model import RewardModelWorker
from quadriga.workers.runtime import CriticWorker


class Recorder:
    """A `TrainEngine` that records the micro-batch size of its passes."""

    def __init__(self) -> None:
        self.sizes: list[int | None] = []

    def forward(self, batch, *, micro_batch_size=None, **_settings):
        self.sizes.append(micro_batch_size)
        zeros = torch.zeros(batch[fields.RESPONSE_MASK].shape)
        return dict.fromkeys(("log_probs", "entropy", "values"), zeros)


def batch() -> DataProto:
    ids = torch.ones(2, 5, dtype=torch.int64)
    names = (fields.INPUT_IDS, fields.ATTENTION_MASK, fields.POSITION_IDS)
    short = (fields.RESPONSES, fields.RESPONSE_MASK)
    return DataProto.from_dict({**dict.fromkeys(names, ids), **dict.fromkeys(short, ids[:, :3])})


@pytest.mark.parametrize(("by_tokens", "expected"), [(False, 3), (True, None)])
def test_log_prob_reference_and_value_passes_have_the_size_of_the_update(by_tokens, expected):
    engine = EngineConfig(use_dynamic_bsz=by_tokens)
    worker = object.__new__(ActorRolloutRefWorker)
    worker.actor, worker.ref = actor, ref = Recorder(), Recorder()
    worker.config = ActorRolloutRefConfig(
        actor=replace(ActorConfig(), engine=engine, ppo_micro_batch_size_per_gpu=3),
        ref=RefConfig(engine=engine),
    )
    worker.compute_log_prob(batch())
    worker.compute_ref_log_prob(batch())
    critic_worker = object.__new__(CriticWorker)
    critic_worker.engine = critic = Recorder()
    critic_worker.config = replace(CriticConfig(), engine=engine, ppo_micro_batch_size_per_gpu=3)
    critic_worker.compute_values(batch())
    assert [actor.sizes, ref.sizes, critic.sizes] == [[expected]] * 3


@pytest.mark.parametrize("by_tokens", [False, True])
def test_a_reward_model_has_at_most_the_sequences_of_its_setting(monkeypatch, by_tokens):
    """It makes no updates, so its setting is of the passes without gradients alone."""
    worker = object.__new__(RewardModelWorker)
    worker.engine, worker.pad, worker.longest = Recorder(), 0, None
    worker.config = RewardModelConfig(
        engine=EngineConfig(use_dynamic_bsz=by_tokens), micro_batch_size_per_gpu=3
    )
    monkeypatch.setattr(worker, "_conversations", lambda data: [([1, 1], [1, 1, 1])] * 2)
    worker.compute_rm_score(batch())
    assert worker.engine.sizes == [3]
