"""Passes without gradients use the micro-batch size of the settings."""

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
)
from quadriga.protocol import DataProto, fields
from quadriga.workers.actor_rollout_ref import ActorRolloutRefWorker
from quadriga.workers.critic import CriticWorker


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
    critic_worker.critic = critic = Recorder()
    critic_worker.config = replace(CriticConfig(), engine=engine, ppo_micro_batch_size_per_gpu=3)
    critic_worker.compute_values(batch())
    assert [actor.sizes, ref.sizes, critic.sizes] == [[expected]] * 3
