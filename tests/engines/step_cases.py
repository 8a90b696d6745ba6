"""Parameters after one optimizer step, over every way in which the step can be computed.

The model is GPT-2, because it computes all in the dtype of its parameters. Models with RMSNorm and
rotary positions compute these in float32 whatever the dtype, and agree only to 1e-7.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import engine_cases as cases
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from quadriga.config.schema import Checkpointing, EngineConfig, ModelConfig, OptimConfig
from quadriga.engines.fsdp import FSDPEngine

TOLERANCE = 1e-10
Rows = Literal["padded", "packed", "shared"]


@dataclass(frozen=True)
class Way:
    """One way to compute an optimizer step.

    Attributes:
        rows: the form of rows. With "shared", rows have equal prompts, which are computed once.
        micro: rows of a micro-batch; None: all.
    """

    checkpointing: Checkpointing
    rows: Rows
    micro: int | None


WAYS = [
    Way(checkpointing, rows, micro)
    for checkpointing, rows, micro in product(
        (False, True, "selective"), ("padded", "packed", "shared"), (1, 2, None)
    )
]


def write_model(folder: str | Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 200, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.2))
    model.save_pretrained(folder)


def make_batch(rows: Rows) -> dict[str, torch.Tensor]:
    """Make seven rows; with "shared", two prompts belong to two rows each."""
    batch = cases.make_batch()
    if rows != "shared":
        for row in cases.SAME_PROMPT:
            batch["input_ids"][row, cases.P - 1] += 1
    return batch


def step(folder: str, way: Way, rows: dict[str, torch.Tensor], **settings) -> FSDPEngine:
    """Return an engine in float64 after one optimizer step."""
    engine = FSDPEngine(
        ModelConfig(path=folder, gradient_checkpointing=way.checkpointing),
        EngineConfig(dtype="float64", reduce_dtype="float64"),
        OptimConfig(lr=0.01),
        packed=way.rows != "padded",
        **settings,
    )
    (tokens,) = engine.global_counts(rows["response_mask"].sum())

    def loss(outputs, micro):
        weight = micro["weight"] * micro["response_mask"]
        return -(outputs["log_probs"] * weight).sum() / tokens, {}

    engine.train_step(rows, loss, micro_batch_size=way.micro)
    return engine


def parameters(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.state_stream()}
