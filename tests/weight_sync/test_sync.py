"""Weight sync: all weights arrive, a missing or wrong weight is named; weight digests."""

from __future__ import annotations

import pytest
import torch

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines import build_engine
from quadriga.errors import WorkerError
from quadriga.rollout import build_rollout
from quadriga.rollout.base import tensor_digest
from quadriga.weight_sync import WeightSync


@pytest.fixture
def rollout(model_folder):
    return build_rollout("hf", ModelConfig(path=model_folder))


@pytest.fixture(scope="module")
def engine(model_folder):
    """An engine after one step, so that every weight differs from the folder's."""
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
    """An engine whose stream of weights is changed by a function."""

    def __init__(self, engine, change):
        self.engine, self.change = engine, change

    def shard_stream(self):
        return self.change(self.engine.shard_stream())

    state_stream = shard_stream


def test_all_weights_arrive(engine, rollout):
    report = WeightSync(engine, rollout).run(7)
    held = rollout.module.state_dict()
    sent = dict(engine.state_stream())
    assert sent.keys() == held.keys()
    assert "lm_head.weight" in sent, "a tied weight is sent under each of its names"
    assert all(torch.equal(sent[name], held[name]) for name in held)
    assert (report.version, report.tensors, rollout.version) == (7, len(held), 7)
    assert report.num_bytes == sum(t.numel() * 4 for t in sent.values())


@pytest.mark.parametrize("left_out", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_missing_weight_is_reported(engine, rollout, left_out):
    faulty = Faulty(engine, lambda stream: (item for item in stream if item[0] != left_out))
    with pytest.raises(WorkerError, match=f"{left_out}.*never sent") as caught:
        WeightSync(faulty, rollout).run(1)
    assert (caught.value.tensor, caught.value.version) == (left_out, 1)


def test_weight_that_the_rollout_ignores_is_reported(engine, rollout, monkeypatch):
    update = rollout.update_weights

    def skip_one(stream, version):
        update(((n, t) for n, t in list(stream) if n != "model.norm.weight"), version)

    monkeypatch.setattr(rollout, "update_weights", skip_one)
    with pytest.raises(
        WorkerError, match=r"1 of 21 weights are wrong: 'model\.norm\.weight' differs"
    ):
        WeightSync(engine, rollout).run(1)


def test_weights_are_rounded_to_the_rollout_dtype_before_comparison(engine, model_folder):
    rollout = build_rollout("hf", ModelConfig(path=model_folder), dtype="bfloat16")
    WeightSync(engine, rollout).run(1)
    name = "model.norm.weight"
    expected = dict(engine.state_stream())[name].to(torch.bfloat16)
    assert torch.equal(rollout.module.state_dict()[name], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_digests_of_different_tensors_differ(dtype):
    base = torch.arange(1, 13).view(3, 4).to(dtype)
    same = base.t().contiguous().t()
    changed, swapped = base.clone(), base.clone()
    changed[2, 1] += 1
    swapped[0, 0], swapped[0, 1] = base[0, 1], base[0, 0]
    assert tensor_digest(base) == tensor_digest(same)
    digests = [tensor_digest(t) for t in (base, changed, swapped, base.flatten()[:-1])]
    assert len(set(digests)) == 4


def test_digest_of_zeros_and_of_an_empty_tensor():
    assert tensor_digest(torch.zeros(3)) != tensor_digest(torch.zeros(4))
    assert tensor_digest(torch.zeros(0)) == 0
