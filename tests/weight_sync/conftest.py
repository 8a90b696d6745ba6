"""A Llama model with a few ten thousand parameters, shared by the tests of this folder."""

from __future__ import annotations

import socket
import time

import pytest
import torch
import torch.multiprocessing as mp

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
    return start_ranks


def start_ranks(count, main, *args, seconds=240):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.spawn(main, args=(*args, port), nprocs=count, join=False)
    deadline = time.monotonic() + seconds
    while not context.join(timeout=1):
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"the {count} ranks did not finish within {seconds} s")
