"""The model of the updates on several ranks."""

from __future__ import annotations

import pytest

from quadriga.models.tiny import TinyModel, write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """The folder of a tiny Llama model."""
    shape = TinyModel(
        hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48
    )
    path = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_model(path, ["one two three"], shape)
    return str(path)
