"""Faults within a rollout engine of 16-bit weights that does not expose them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines import build_engine
from quadriga.errors import WorkerError
from quadriga.rollout import build_rollout
from quadriga.rollout.base import RolloutEngine, tensor_digest
from quadriga.weight_sync.sync import WeightSync
from training_step import train_once

LAYER = "model.layers.1."
SOME = ["model.norm.weight", f"{LAYER}self_attn.k_proj.weight", f"{LAYER}mlp.up_proj.weight"]


@pytest.fixture
def engine(model_folder):
    return build_engine(ModelConfig(path=model_folder), EngineConfig(), OptimConfig(lr=0.01))


class Hidden(RolloutEngine):
    """A rollout engine in bfloat16 that does not expose its weights.

    `fault` changes what its own model gets; the caller cannot see that. `lost` changes what arrives
    at its process, of which it has receipts.
    """

    name = "hidden"
    generate = score = None

    def __init__(self, folder, fault=lambda weights: weights):
        self.engine = build_rollout("hf", ModelConfig(path=folder), dtype="bfloat16")
        self.abilities = replace(self.engine.abilities, exposes_weights=False)
        self.score, self.weight_dtypes = self.engine.score, self.engine.weight_dtypes
        self.fault, self.lost, self.digests = fault, lambda weights: weights, {}

    @property
    def version(self):
        return self.engine.version

    def update_weights(self, stream, version):
        dtypes, weights = self.weight_dtypes(), self.lost(dict(stream))
        self.digests |= {n: tensor_digest(w.to(dtypes.get(n))) for n, w in weights.items()}
        self.engine.update_weights(self.fault(weights).items(), version)

    def received_digests(self):
        return self.digests


def without(name):
    return lambda weights: {n: w for n, w in weights.items() if n != name}


def exchanged(weights):
    """The rows of k and v in each other's place, as in a fused projection of wrong order."""
    k, v = (f"{LAYER}self_attn.{part}_proj.weight" for part in "kv")
    other = {k: v, v: k}
    return {other.get(name, name): w for name, w in weights.items()}


def test_an_engine_without_a_fault_passes(engine, model_folder):
    hidden = Hidden(model_folder)
    sync = WeightSync(engine, hidden)
    for version in (1, 2, 3):
        sync.run(version)
        held = hidden.engine.module.state_dict()
        sent = dict(engine.state_stream())
        assert all(torch.equal(sent[n].to(torch.bfloat16), w) for n, w in held.items())
        train_once(engine)


def test_rows_of_a_fused_projection_in_a_wrong_order_are_found_in_the_first_sync(
    engine, model_folder
):
    with pytest.raises(WorkerError, match="differ by"):
        WeightSync(engine, Hidden(model_folder, exchanged)).run(1)


def test_receipts_name_a_stale_weight_at_once(engine, model_folder):
    hidden = Hidden(model_folder)
    sync = WeightSync(engine, hidden)
    sync.run(1)
    hidden.lost = without(SOME[1])
    with torch.no_grad():  # a change far below the rounding of the scores
        for weight in engine.module.parameters():
            weight.mul_(1.01)
    with pytest.raises(WorkerError, match=f"1 of 21 weights are wrong: '{SOME[1]}' differs"):
        sync.run(2)
