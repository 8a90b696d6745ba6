"""A sync that leaves a weight out, or gets one wrong, stops the run and names it."""

from __future__ import annotations

import pytest
import torch

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines import build_engine
from quadriga.errors import WorkerError
from quadriga.rollout import build_rollout
from quadriga.weight_sync import sync_weights


@pytest.fixture
def rollout(model_folder):
    return build_rollout("hf", ModelConfig(path=model_folder))


@pytest.fixture(scope="module")
def engine(model_folder):
    """Trained one step, so that every weight differs from the folder's."""
    engine = build_engine(ModelConfig(path=model_folder), EngineConfig(), OptimConfig(lr=0.01))
    ids = torch.arange(5, 45).view(4, 10)
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "response_mask": torch.ones(4, 6, dtype=torch.int64),
    }
    engine.train_step(batch, lambda out, rows: (-out["log_probs"].sum(), {}))
    return engine


class Faulty:
    """An engine whose stream is changed on its way."""

    def __init__(self, engine, change):
        self.engine, self.change = engine, change

    def state_stream(self):
        return self.change(self.engine.state_stream())


def test_all_weights_arrive(engine, rollout):
    report = sync_weights(engine, rollout, 7)
    held = rollout.module.state_dict()
    sent = dict(engine.state_stream())
    assert sent.keys() == held.keys()
    assert "lm_head.weight" in sent, "tied, and named all the same"
    assert all(torch.equal(sent[name], held[name]) for name in held)
    assert (report.version, report.tensors, rollout.version) == (7, len(held), 7)
    assert report.num_bytes == sum(t.numel() * 4 for t in sent.values())


@pytest.mark.parametrize("left_out", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_weight_left_out_stops(engine, rollout, left_out):
    faulty = Faulty(engine, lambda stream: (item for item in stream if item[0] != left_out))
    with pytest.raises(WorkerError, match=f"{left_out}.*never sent") as caught:
        sync_weights(faulty, rollout, 1)
    assert (caught.value.tensor, caught.value.version) == (left_out, 1)


def test_a_weight_that_the_rollout_drops_stops(engine, rollout, monkeypatch):
    update = rollout.update_weights

    def skip_one(stream, version):
        update(((n, t) for n, t in list(stream) if n != "model.norm.weight"), version)

    monkeypatch.setattr(rollout, "update_weights", skip_one)
    with pytest.raises(WorkerError, match=r"model\.norm\.weight.*differs"):
        sync_weights(engine, rollout, 1)


def test_a_rollout_of_another_precision_is_compared_after_rounding(engine, model_folder):
    rollout = build_rollout("hf", ModelConfig(path=model_folder), dtype="bfloat16")
    sync_weights(engine, rollout, 1)
    name = "model.norm.weight"
    expected = dict(engine.state_stream())[name].to(torch.bfloat16)
    assert torch.equal(rollout.module.state_dict()[name], expected)
