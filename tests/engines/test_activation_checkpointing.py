"""Activation checkpointing changes what is kept and computed again, and no parameter.

Steps of one rank run in `make test`, those of two ranks in `make nightly`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import step_cases as cases
import torch
from step_cases import WAYS, Way
from torch.utils._python_dispatch import TorchDispatchMode

from quadriga.config.schema import ModelConfig
from quadriga.engines.activation_checkpointing import is_expensive
from quadriga.engines.loading import simulated_model
from quadriga.errors import ModelError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt2")
    cases.write_model(path)
    return str(path)


@pytest.fixture(scope="module")
def expected(folder):
    """Return form of rows → parameters after a step with padded rows, in one micro-batch."""
    found = {}
    for rows in ("packed", "shared"):
        plain = Way(False, "padded", None)
        found[rows] = cases.parameters(cases.step(folder, plain, cases.make_batch(rows)))
    return found | {"padded": found["packed"]}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert float((found[name] - tensor).abs().max()) <= cases.TOLERANCE, name


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_parameters_after_a_step_of_one_rank(way, folder, expected):
    engine = cases.step(folder, way, cases.make_batch(way.rows))
    assert_equal(cases.parameters(engine), expected[way.rows])


class CountOperators(TorchDispatchMode):
    """Count the operators that run, by name."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().partition("::")[2]
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def test_selective_computes_cheap_operators_again_and_expensive_ones_once(folder):
    found = {}
    for form in (False, True, "selective"):
        with CountOperators() as counter:
            cases.step(folder, Way(form, "packed", None), cases.make_batch("packed"))
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


def test_a_model_without_layers_that_say_so_is_refused(folder):
    config = ModelConfig(path=folder)
    model = simulated_model(config, "lm", torch.float32, trained=True)
    model.transformer.h = torch.nn.ModuleList()
    from quadriga.engines.activation_checkpointing import checkpoint_layers

    with pytest.raises(ModelError, match=r"model\.gradient_checkpointing=false"):
        checkpoint_layers(model, "selective")
    checkpoint_layers(model, replace(config, gradient_checkpointing=False).gradient_checkpointing)
