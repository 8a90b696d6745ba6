"""The settings with which the reference policy is computed, with adapters and without."""

import pytest
import torch

from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import ConfigError
from quadriga.protocol import DataProto
from quadriga.trainer.checks.settings import check_train_settings
from quadriga.workers.actor_rollout_ref import ActorRolloutRefWorker

ACTOR = "actor_rollout_ref.actor"
LORA = "actor_rollout_ref.model.lora.rank=2"


@pytest.mark.parametrize(
    ("role", "more", "expected"),
    [
        ("actor_rollout_ref", [LORA], 2),  # the engine of the actor
        ("ref", [LORA], None),  # a model of its own, cut by tokens
        ("actor_rollout_ref", [], None),
        ("actor_rollout_ref", ["actor_rollout_ref.ref.engine.use_dynamic_bsz=false"], 2),
    ],
)
def test_the_reference_is_cut_as_the_engine_that_computes_it(
    folder, monkeypatch, role, more, expected
) -> None:
    config = load_config(
        TrainConfig,
        [f"actor_rollout_ref.model.path={folder}", f"{ACTOR}.engine.use_dynamic_bsz=false",
         f"{ACTOR}.ppo_micro_batch_size_per_gpu=2", *more],
    )  # fmt: skip
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role)
    seen = []

    class Engine:
        def forward(self, rows, *, micro_batch_size, **settings):
            seen.append(micro_batch_size)
            return {"log_probs": torch.zeros(4, 3)}

    monkeypatch.setattr(worker, "ref", Engine())
    fields = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")
    rows = DataProto.from_dict({name: torch.ones(4, 3, dtype=torch.long) for name in fields})
    worker.compute_ref_log_prob(rows)
    assert seen == [expected]


def test_kl_over_the_vocabulary_compares_the_engines_that_compute() -> None:
    full = [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full"]
    ranks = ["trainer.n_gpus_per_node=2", f"{ACTOR}.engine.sequence_parallel_size=2"]
    check_train_settings(load_config(TrainConfig, [*full, *ranks, LORA]))
    with pytest.raises(ConfigError, match="computes policy and reference in one worker"):
        check_train_settings(load_config(TrainConfig, [*full, *ranks]))
