"""A response that other weights sampled than the actor's ends the run before it is trained on."""

import pytest
import torch

from quadriga.errors import RolloutOutputError
from quadriga.protocol import DataProto, fields
from quadriga.trainer.worker_groups import PPOGroups, VersionedRollout

APART = ("trainer.n_gpus_per_node=2", "placement.actor=[0]", "placement.rollout=[1]")
COPY = ("actor_rollout_ref.rollout.share_weights=false",)


@pytest.mark.parametrize("more", [COPY, APART], ids=["in one process", "apart"])
def test_responses_after_an_update_without_a_sync_end_the_run(run, monkeypatch, more) -> None:
    synced = []
    monkeypatch.setattr(PPOGroups, "sync_weights", lambda groups, *_: synced.append(groups) or {})
    with pytest.raises(RolloutOutputError, match=r"by weights of version 1, .* has version 2") as e:
        run(*more)
    assert len(synced) == 1  # the first step ended: its responses are of the version of the start
    assert (e.value.fault, e.value.version) == ("weight version", 1)


class Rollout:
    """A rollout whose ranks return these versions."""

    world_size = 2

    def __init__(self, *versions: int) -> None:
        self.versions = versions

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        return DataProto.from_dict({fields.WEIGHT_VERSION: torch.tensor(self.versions)})


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ((3, 2, 3, 1), "2 of 4 responses, row 1 first, were sampled by weights of version 1, 2"),
        ((4, 4), "2 of 2 responses, row 0 first"),
    ],
)
def test_rows_of_older_and_newer_versions_are_named(versions, message) -> None:
    prompts = DataProto.from_dict({fields.SAMPLE_SEED: torch.zeros(len(versions))})
    with pytest.raises(RolloutOutputError, match=message):
        VersionedRollout(Rollout(*versions), lambda: 3).generate_sequences(prompts)
