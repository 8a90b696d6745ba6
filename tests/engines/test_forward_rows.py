"""Passes without gradients keep the limits of the settings."""

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
from quadriga.workers.runtime import CriticWorker


@pytest.mark.parametrize(("by_tokens", "expected"), [(False, 3), (True, None)])
def test_passes_have_the_size_of_the_update(by_tokens, expected):
    sizes = []

    class Recorder:
        def forward(self, batch, *, micro_batch_size=None, **_settings):
            sizes.append(micro_batch_size)
            zeros = torch.zeros(batch[fields.RESPONSE_MASK].shape)
            return dict.fromkeys(("log_probs", "entropy", "values"), zeros)

    ids = torch.ones(2, 5, dtype=torch.int64)
    names = (fields.INPUT_IDS, fields.ATTENTION_MASK, fields.POSITION_IDS)
    short = dict.fromkeys((fields.RESPONSES, fields.RESPONSE_MASK), ids[:, :3])
    batch = DataProto.from_dict(dict.fromkeys(names, ids) | short)
    policy, critic = map(object.__new__, (ActorRolloutRefWorker, CriticWorker))
    policy.actor = policy.ref = critic.engine = Recorder()
    engine, size = EngineConfig(use_dynamic_bsz=by_tokens), {"ppo_micro_batch_size_per_gpu": 3}
    policy.config = ActorRolloutRefConfig(
        actor=replace(ActorConfig(), engine=engine, **size), ref=RefConfig(engine=engine)
    )
    policy.compute_log_prob(batch)
    policy.compute_ref_log_prob(batch)
    critic.config = replace(CriticConfig(), engine=engine, **size)
    critic.compute_values(batch)
    assert sizes == [expected] * 3
