"""An export has the dtypes of the folder that the model was loaded from."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quadriga.config.schema import EngineConfig, ModelConfig, OptimConfig
from quadriga.engines.fsdp import FSDPEngine
from quadriga.models import load_causal_lm
from quadriga.models.tiny import TinyModel, write_tiny_model
from quadriga.models.weights import StoredDtypes

SHAPE = TinyModel(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=48)


@pytest.fixture
def folder(tmp_path):
    """A bfloat16 model whose final norm is float32."""
    path = tmp_path / "model"
    write_tiny_model(path, ["one two three"], SHAPE)
    file = path / "model.safetensors"
    weights = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    weights["model.norm.weight"] = weights["model.norm.weight"].float()
    save_file(weights, file, metadata={"format": "pt"})
    return path


def test_cast_keeps_integers_and_gives_new_weights_the_default():
    dtypes = StoredDtypes({"a": torch.float16}, torch.bfloat16)
    weights = [
        ("a", torch.ones(1)),
        ("new", torch.ones(1)),
        ("n", torch.ones(1, dtype=torch.int64)),
    ]
    found = [tensor.dtype for _, tensor in dtypes.cast(weights)]
    assert found == [torch.float16, torch.bfloat16, torch.int64]


def test_trained_bfloat16_model_is_exported_in_bfloat16(folder, tmp_path):
    engine = FSDPEngine(ModelConfig(path=str(folder)), EngineConfig(), OptimConfig())
    assert {tensor.dtype for _, tensor in engine.state_stream()} == {torch.float32}
    engine.save_hf(tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    original = load_file(folder / "model.safetensors")
    assert {n: t.dtype for n, t in exported.items()} == {n: t.dtype for n, t in original.items()}
    assert all(torch.equal(exported[name], tensor) for name, tensor in original.items())
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_causal_lm(tmp_path / "export", dtype="auto").dtype == torch.bfloat16
    assert engine.module.config.dtype == torch.float32
