"""An engine `sglang` over a program that answers as SGLang does, and requests for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from quadriga.config.schema import ModelConfig
from quadriga.rollout import build_rollout
from quadriga.rollout.base import SamplingParams

SAMPLING = SamplingParams(max_new_tokens=3, eos_token_ids=(2,), pad_token_id=0)
SQUARE = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    """An interpreter that runs the fake program in place of the host of SGLang."""
    script = tmp_path_factory.mktemp("fake") / "python"
    fake = Path(__file__).with_name("fake_sglang.py")
    script.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exit 0\nexec {sys.executable} {fake} "$@"\n', encoding="utf-8"
    )
    script.chmod(0o755)
    return str(script)


@pytest.fixture(scope="module")
def engine(interpreter, model_folder, tmp_path_factory):
    """One engine for all tests whose faults do not end it."""
    lives = tmp_path_factory.mktemp("shared") / "lives"
    engine = built(interpreter, model_folder, lives)
    yield engine
    engine.close()


@pytest.fixture
def faulty(engine):
    """Set the faults of the shared engine."""
    yield lambda faults: engine._client.call("/faults", faults)
    engine._client.call("/faults", {})


@pytest.fixture
def start(interpreter, model_folder, tmp_path):
    engines = []

    def start(*, faults=None, **options):
        engines.append(built(interpreter, model_folder, tmp_path / "lives", faults, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def built(interpreter, model_folder, lives, faults=None, **options):
    return build_rollout(
        "sglang",
        ModelConfig(path=model_folder),
        python=interpreter,
        server_args={"lives": str(lives), "faults": faults or {}},
        request_rows=2,
        start_timeout_s=150,
        **options,
    )


def batch(*rows):
    width = max(len(row) for row in rows) + 1
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = torch.tensor(row)
        mask[i, width - len(row) :] = 1
    return ids, mask


ROWS = batch((5, 6), (7,), (8, 9, 10), (11, 2), (12,))


def generate(engine, sampling=SAMPLING, rows=ROWS):
    return engine.generate(*rows, sampling, torch.arange(len(rows[0])))


def noise(engine, seed=0):
    random = torch.Generator().manual_seed(seed)
    shapes = engine._client._shapes
    return {name: torch.rand(shape, generator=random) for name, shape in shapes.items()}


def lives(tmp_path):
    return [int(line) for line in (tmp_path / "lives").read_text().splitlines()]
