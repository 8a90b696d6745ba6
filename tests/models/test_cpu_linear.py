"""Linear layers on a CPU: the numbers of `nn.Linear`; oneDNN computes the large products."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from processes import run_python
from quadriga.engines.activation_checkpointing import is_expensive
from quadriga.models import TinyModel, write_tiny_model
from quadriga.models.cpu_linear import MIN_PRODUCTS, CpuLinear, has_onednn, use_cpu_linear
from quadriga.models.loading import load_causal_lm, load_value_model, model_without_weights

OPERATOR = "mkldnn::_linear_pointwise"
needs_onednn = pytest.mark.skipif(not has_onednn(), reason="torch was built without oneDNN")


def layers(inputs: int, outputs: int, *, bias: bool) -> tuple[nn.Linear, nn.Linear]:
    """Return a `CpuLinear`, and an `nn.Linear` with the same weights in float64."""
    torch.manual_seed(0)
    holder = nn.Sequential(nn.Linear(inputs, outputs, bias=bias))
    wide = deepcopy(holder[0]).double()
    use_cpu_linear(holder)
    layer = holder[0]
    assert isinstance(layer, CpuLinear) and type(wide) is nn.Linear
    return layer, wide


def operators(layer: nn.Module, rows: Tensor) -> set[str]:
    """Return the names of the operators of a forward and backward pass."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        layer(rows).sum().backward()
    return {event.key for event in trace.key_averages()}


def arranged(rows: Tensor, form: str) -> Tensor:
    """Return the same numbers in another order of memory."""
    if form == "transposed":
        return rows.transpose(-1, -2).contiguous().transpose(-1, -2)
    if form == "sliced":
        return torch.cat([rows, rows, rows], -1)[..., rows.shape[-1] : 2 * rows.shape[-1]]
    return rows


@needs_onednn
@pytest.mark.parametrize("form", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(300, 96), (1, 300, 96), (3, 100, 96)])
def test_numbers_are_those_of_a_linear_layer(shape: tuple[int, ...], bias: bool, form: str) -> None:
    layer, wide = layers(96, 70, bias=bias)
    rows = arranged(torch.randn(shape), form).requires_grad_()
    wide_rows = rows.detach().double().requires_grad_()
    weights = arranged(torch.randn(*shape[:-1], 70), form)
    assert rows.numel() * 70 >= MIN_PRODUCTS
    out, wide_out = layer(rows), wide(wide_rows)
    (out * weights).sum().backward()
    (wide_out * weights).sum().backward()
    found = [out, rows.grad, *(p.grad for p in layer.parameters())]
    expected = [wide_out, wide_rows.grad, *(p.grad for p in wide.parameters())]
    for a, b in zip(found, expected, strict=True):
        assert a is not None and b is not None
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-4)
    with torch.inference_mode():
        torch.testing.assert_close(layer(rows), out.detach(), rtol=1e-6, atol=1e-6)


@needs_onednn
def test_large_products_are_given_to_onednn_and_small_ones_are_not() -> None:
    layer, _ = layers(64, 128, bias=True)
    rows = MIN_PRODUCTS // (64 * 128)
    assert OPERATOR in operators(layer, torch.randn(rows, 64))
    assert OPERATOR not in operators(layer, torch.randn(rows - 1, 64))
    assert OPERATOR not in operators(layer.bfloat16(), torch.randn(rows, 64).bfloat16())
    assert OPERATOR not in operators(layer.double(), torch.randn(rows, 64).double())


@needs_onednn
def test_a_frozen_weight_has_no_gradient() -> None:
    layer, wide = layers(128, 256, bias=True)
    layer.requires_grad_(False)
    rows = torch.randn(64, 128, requires_grad=True)
    layer(rows).sum().backward()
    assert rows.grad is not None and layer.weight.grad is None and layer.bias.grad is None
    expected = wide.weight.sum(0).expand(64, -1)
    torch.testing.assert_close(rows.grad.double(), expected, rtol=1e-5, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("shape", [(300, 96), (3, 100, 96)])
def test_the_output_may_be_changed_in_place(shape: tuple[int, ...]) -> None:
    layer, _ = layers(96, 70, bias=True)
    rows = torch.randn(shape, requires_grad=True)
    out = layer(rows)
    assert not out._is_view()
    out.mul_(2.0).sum().backward()
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad, 2 * layer.weight.detach().sum(0).expand(shape))


def test_subclasses_of_linear_are_left_out() -> None:
    class Own(nn.Linear):
        """A layer that computes something of its own."""

    holder = nn.Sequential(Own(4, 4), nn.Linear(4, 4))
    use_cpu_linear(holder)
    assert [type(m) for m in holder] == [Own, CpuLinear if has_onednn() else nn.Linear]


@needs_onednn
def test_every_model_that_is_loaded_has_these_layers(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, ["one two"], TinyModel(hidden_size=24, num_layers=1))
    for model in (
        load_causal_lm(tmp_path),
        load_value_model(tmp_path),
        model_without_weights(tmp_path, value_head=False, dtype="float32", buffers=True),
    ):
        assert not [name for name, m in model.named_modules() if type(m) is nn.Linear]


def test_selective_checkpointing_keeps_its_output() -> None:
    assert is_expensive(OPERATOR)


SHAPES = """
import torch
from torch import nn
from quadriga.models.cpu_linear import use_cpu_linear

def resident():
    return int(open("/proc/self/statm").read().split()[1]) // 256

torch.set_num_threads(1)
use_cpu_linear(model := nn.Sequential(nn.Linear(256, 256)))
sizes = []
for rows in (400, *range(64, 184)):
    model(torch.randn(rows, 256, requires_grad=True)).sum().backward()
    sizes.append(resident())
print(sizes[-1] - sizes[0])
"""


@needs_onednn
@pytest.mark.nightly
def test_memory_does_not_grow_with_the_number_of_shapes() -> None:
    grown = run_python("-c", SHAPES, timeout=170).stdout
    assert int(grown.splitlines()[-1]) < 100, grown  # MB; oneDNN alone would keep about 200
