"""A Llama model with a few ten thousand parameters, shared by the tests of this folder."""

from __future__ import annotations

import pytest
import torch

from quadriga.models.tiny import TinyModel, write_tiny_model
from quadriga.testing import write_reference_model

torch.set_num_threads(1)
SHAPE = TinyModel(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_model(folder, ["one two three"], SHAPE)
    return str(folder)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The model of the laws of rollout engines."""
    path = str(tmp_path_factory.mktemp("reference") / "model")
    write_reference_model(path)
    return path
