"""Activation checkpointing changes what is kept and computed again, and no parameter.

The model is GPT-2, because it computes all in the dtype of its parameters. Models with RMSNorm and
rotary positions compute these in float32 whatever the dtype, and agree only to 1e-7.
"""

from dataclasses import dataclass
from itertools import product
from typing import Literal

import engine_cases as cases
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quadriga.config.schema import Checkpointing, EngineConfig, ModelConfig, OptimConfig
from quadriga.engines.activation_checkpointing import checkpoint_layers, is_expensive
from quadriga.engines.fsdp import FSDPEngine
from quadriga.engines.loading import simulated_model
from quadriga.errors import ModelError

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


def engine_after_step(
    folder: str, way: Way, rows: dict[str, torch.Tensor], **settings
) -> FSDPEngine:
    """Return an engine in float64 after one optimizer step."""
    engine = FSDPEngine(
        ModelConfig(path=folder, gradient_checkpointing=way.checkpointing),
        EngineConfig(dtype="float64", reduce_dtype="float64"),
        OptimConfig(lr=0.01),
        packed=way.rows != "padded",
    )
    (tokens,) = engine.global_counts(rows["response_mask"].sum())

    def loss(outputs, micro):
        weight = micro["weight"] * micro["response_mask"]
        return -(outputs["log_probs"] * weight).sum() / tokens, {}

    engine.train_step(rows, loss, micro_batch_size=way.micro)
    return engine


@pytest.fixture(scope="module")
def expected(gpt2_folder):
    """Return form of rows → parameters after a step with padded rows, in one micro-batch."""
    found = {}
    for rows in ("packed", "shared"):
        plain = Way(False, "padded", None)
        found[rows] = cases.weights(
            engine_after_step(gpt2_folder, plain, cases.make_batch(shared=rows == "shared"))
        )
    return found | {"padded": found["packed"]}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_parameters_after_a_step_of_one_rank(way, gpt2_folder, expected):
    engine = engine_after_step(gpt2_folder, way, cases.make_batch(shared=way.rows == "shared"))
    cases.assert_close(cases.weights(engine), expected[way.rows], atol=TOLERANCE)


class CountOperators(TorchDispatchMode):
    """Count the operators that run, by name."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2]
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def test_selective_computes_cheap_operators_again_and_expensive_ones_once(gpt2_folder):
    found = {}
    for form in (False, True, "selective"):
        with CountOperators() as counter:
            engine_after_step(
                gpt2_folder, Way(form, "packed", None), cases.make_batch(shared=False)
            )
        found[form] = counter.counts
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    for name in ("addmm", attention):
        assert found["selective"][name] == found[False][name] < found[True][name]
    for name in ("tanh", "native_layer_norm"):
        assert found[False][name] < found["selective"][name] <= found[True][name]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("aten::mm", True),
        ("aten::addmm.default", True),
        ("aten::_grouped_mm", True),
        ("transformers::grouped_mm_fallback", True),
        ("aten::_scaled_dot_product_flash_attention", True),
        ("flash_attn::_flash_attn_varlen_forward", True),
        ("flex_attention", True),
        ("aten::mm.out", False),
        ("aten::bmm", False),
        ("aten::add.Tensor", False),
        ("aten::native_layer_norm", False),
    ],
)
def test_expensive_operators_are_products_with_weights_and_attention(name, kept):
    assert is_expensive(name) is kept


def test_a_model_without_layers_that_say_so_is_refused(gpt2_folder):
    model = simulated_model(ModelConfig(path=gpt2_folder), "lm", torch.float32, trained=True)
    model.transformer.h = torch.nn.ModuleList()
    with pytest.raises(ModelError, match=r"model\.gradient_checkpointing=false"):
        checkpoint_layers(model, "selective")
    checkpoint_layers(model, False)
