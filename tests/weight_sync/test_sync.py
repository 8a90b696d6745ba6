"""Weight sync: all weights arrive, a missing or wrong weight is named; weight digests."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines import build_engine
from quadriga.errors import WorkerError
from quadriga.rollout import build_rollout
from quadriga.rollout.base import RolloutEngine, tensor_digest
from quadriga.rollout.guard import compare_digests
from quadriga.weight_sync.sync import WeightSync
from training_step import train_once


@pytest.fixture
def rollout(model_folder):
    return build_rollout("hf", ModelConfig(path=model_folder))


@pytest.fixture(scope="module")
def engine(model_folder):
    """An engine after one step, so that every weight differs from the folder's."""
    engine = build_engine(ModelConfig(path=model_folder), EngineConfig(), OptimConfig(lr=0.01))
    train_once(engine)
    return engine


class Faulty:
    """An engine whose stream of weights is changed by a function."""

    def __init__(self, engine, change):
        self.engine, self.change = engine, change

    def shard_stream(self, part="merged"):
        yield from self.change(self.engine.shard_stream(part))


def test_all_weights_arrive(engine, rollout):
    report = WeightSync(engine, rollout).run(7)
    held = rollout.module.state_dict()
    sent = dict(engine.state_stream())
    assert sent.keys() == held.keys()
    assert "lm_head.weight" in sent, "a tied weight is sent under each of its names"
    assert all(torch.equal(sent[name], held[name]) for name in held)
    assert rollout.version == 7
    assert report.num_bytes == sum(t.numel() * 4 for t in sent.values())


class Wrapped(RolloutEngine):
    """A rollout engine around another one."""

    name = "wrapped"
    generate = score = None

    def __init__(self, engine):
        self.engine, self.abilities = engine, engine.abilities
        self.score = engine.score
        self.weights_digest, self.weight_dtypes = engine.weights_digest, engine.weight_dtypes

    @property
    def version(self):
        return self.engine.version

    def update_weights(self, stream, version):
        self.engine.update_weights(stream, version)


def test_a_weight_that_was_not_sent_again_is_reported(engine, model_folder):
    """A rollout that keeps one weight of an earlier version."""
    rollout = build_rollout("hf", ModelConfig(path=model_folder))
    kept = "model.layers.1.mlp.down_proj.weight"
    stale = Stale(rollout, kept)
    with pytest.raises(WorkerError, match=r"1 of 21 weights are wrong: .*down_proj.* differs"):
        WeightSync(engine, stale).run(1)


class Stale(Wrapped):
    def __init__(self, engine, kept):
        super().__init__(engine)
        self.kept = kept

    def update_weights(self, stream, version):
        sent = ((name, tensor) for name, tensor in list(stream) if name != self.kept)
        self.engine.update_weights(sent, version)


def test_a_sync_that_breaks_off_ends_the_stream_of_the_engine(engine, rollout, monkeypatch):
    """The engine may have loaded its weights for the stream, and frees them when it ends."""
    ended = []

    def noted(stream):
        try:
            yield from stream
        finally:
            ended.append(True)

    def refuse(weights, version):
        next(iter(weights))
        raise WorkerError("the rollout engine refuses the weights")

    sync = WeightSync(Faulty(engine, noted), rollout)
    sync.run(1)
    monkeypatch.setattr(rollout, "update_weights", refuse)
    ended.clear()
    with pytest.raises(WorkerError, match="refuses the weights") as caught:
        sync.run(2)
    assert ended == [True] and caught.value is not None, "while the error is still held"


def test_a_later_sync_with_other_weights_is_reported(engine, rollout):
    faulty = Faulty(engine, lambda stream: stream)
    sync = WeightSync(faulty, rollout)
    sync.run(1)
    name = "model.norm.weight"
    faulty.change = lambda stream: (item for item in stream for _ in range(2))
    with pytest.raises(WorkerError, match="twice"):
        sync.run(2)
    faulty.change = lambda stream: (item for item in stream if item[0] != name)
    with pytest.raises(WorkerError, match=r"did not yield weight 'model\.norm\.weight'"):
        sync.run(3)
    faulty.change = lambda stream: (("new" if n == name else n, t) for n, t in stream)
    with pytest.raises(WorkerError, match="yielded weight 'new', which it did not have before"):
        sync.run(4)


def test_all_wrong_weights_are_listed_up_to_a_bound():
    sent = {f"w{i}": i for i in range(50)}
    with pytest.raises(WorkerError, match=r"50 of 50 .* 'w19' differs .*; and 30 more") as caught:
        compare_digests(sent, dict.fromkeys(sent, -1), 3)
    assert len(caught.value.tensors) == 50 and caught.value.version == 3


class Scored(Wrapped):
    """An engine that does not expose its weights."""

    def __init__(self, engine):
        super().__init__(engine)
        self.abilities = replace(engine.abilities, exposes_weights=False)


def test_an_engine_without_digests_is_compared_by_scores(engine, rollout):
    scored = Scored(rollout)
    sync = WeightSync(engine, scored)
    sync.run(1)
    name = "model.layers.1.mlp.up_proj.weight"
    scored.update_weights = Stale(rollout, name).update_weights
    with torch.no_grad():
        rollout.module.state_dict()[name].zero_()
    with pytest.raises(
        WorkerError, match="log-probabilities of 248 probe tokens differ by"
    ) as caught:
        sync.run(2)
    assert caught.value.difference > 1e-3


@pytest.mark.parametrize("left_out", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_missing_weight_is_reported(engine, rollout, left_out):
    faulty = Faulty(engine, lambda stream: (item for item in stream if item[0] != left_out))
    with pytest.raises(WorkerError, match=f"{left_out}.*never sent") as caught:
        WeightSync(faulty, rollout).run(1)
    assert (caught.value.tensor, caught.value.version) == (left_out, 1)


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
