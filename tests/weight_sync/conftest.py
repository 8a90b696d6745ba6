"""A Llama model with a few ten thousand parameters, shared by the tests of this folder."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import rank_groups
from quadriga.models.tiny import TinyModel, write_tiny_model

torch.set_num_threads(1)
SHAPE = TinyModel(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_model(folder, ["one two three"], SHAPE)
    return str(folder)


@pytest.fixture(scope="session")
def run_ranks():
    """`run_ranks(count, main, *args)` runs `main(rank, *args, port)` in `count` processes."""
    return partial(rank_groups.run_ranks, wait_s=240)
