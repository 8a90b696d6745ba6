"""The worker calls its rollout engine through a guard with the settings of the run, and ends it."""

import threading

import pytest
import torch

from fake_rollout import FakeRollout
from quadriga.config.loading import load_config
from quadriga.config.schema import TrainConfig
from quadriga.errors import RolloutTimeoutError
from quadriga.protocol import DataProto, fields
from quadriga.rollout.hf import HF
from quadriga.trainer.stages import generation_inputs
from quadriga.workers import actor_rollout_ref
from quadriga.workers.actor_rollout_ref import ActorRolloutRefWorker
from quadriga.workers.runtime import RankRuntime

SECTION = "actor_rollout_ref"


def test_a_wedged_engine_ends_at_the_deadline_of_the_settings(folder, monkeypatch) -> None:
    built = []

    def build(rollout, model, device, **settings):
        built.append(FakeRollout(model.path, fault="wedges"))
        assert settings["releasable"] is False  # take_turns is off
        return built[-1]

    monkeypatch.setattr(HF, "build", build)
    overrides = [f"{SECTION}.model.path={folder}", f"{SECTION}.rollout.deadline_s=0.1"]
    config = load_config(TrainConfig, overrides).actor_rollout_ref
    worker = ActorRolloutRefWorker(config, "rollout", RankRuntime(max_response_length=8))
    worker.init_model()
    ids = torch.tensor([[5, 6]])
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    prompts = DataProto.from_dict({**rows, fields.SAMPLE_SEED: torch.tensor([1])})
    threads = set(threading.enumerate())
    with pytest.raises(RolloutTimeoutError, match=r"on rank 0, generate: .*rollout\.deadline_s"):
        worker.generate_sequences(generation_inputs(prompts))
    assert not built[0]._closed.is_set()
    worker.close_rollout()
    assert built[0]._closed.is_set()
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
        assert not thread.is_alive()


ACTOR, OPTIONS = f"{SECTION}.actor.engine", f"{SECTION}.rollout.options"


@pytest.mark.parametrize(
    ("role", "settings", "parts"),
    [
        ("actor_rollout", (f"{ACTOR}.tensor_parallel_size=4",), [0, 1, 0, 1, 2, 3, 2, 3]),
        ("actor_rollout", (), [0, 0, 1, 1, 2, 2, 3, 3]),
        # Ranks that only generate are neighbours, whatever the actor of the settings is.
        ("rollout", (f"{ACTOR}.tensor_parallel_size=4",), [0, 0, 1, 1, 2, 2, 3, 3]),
        ("actor_rollout", (f"{OPTIONS}.tensor_parallel_size=1",), list(range(8))),
        # Ranks that divide tokens too are numbered in another way.
        (
            "actor_rollout",
            (f"{ACTOR}.tensor_parallel_size=4", f"{ACTOR}.sequence_parallel_size=2"),
            [0, 0, 1, 1, 2, 2, 3, 3],
        ),
    ],
)
def test_the_ranks_of_a_copy_receive_the_same_rows(
    folder, monkeypatch, role, settings, parts
) -> None:
    monkeypatch.setattr(actor_rollout_ref, "prepare_rank", lambda *_, **__: "cpu")
    monkeypatch.setenv("WORLD_SIZE", "8")
    given = [
        f"{SECTION}.model.path={folder}", f"{SECTION}.rollout.name=vllm",
        f"{OPTIONS}.tensor_parallel_size=2", *settings,
    ]  # fmt: skip
    config = load_config(TrainConfig, given).actor_rollout_ref
    found = []
    for rank in range(8):
        monkeypatch.setenv("RANK", str(rank))
        found.append(ActorRolloutRefWorker(config, role)._query_mesh("rollout"))
    assert [part for part, _ in found] == parts
    # The first rank of each copy returns the result.
    first = [parts.index(part) == rank for rank, part in enumerate(parts)]
    assert [collected for _, collected in found] == first
