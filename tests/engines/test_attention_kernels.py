"""Each attention kernel against a naive loop over single tokens, in float64.

The flash kernel runs on CUDA devices only, so a function with its arguments stands for it. Flex
attention is not compiled here; torch refuses its backward pass on a CPU, but can compute it.
"""

import attention_cases as cases
import pytest
import torch
from attention_cases import ROWS, Sizes
from torch.nn.attention import flex_attention as flex_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from quadriga.engines.attention import kernels
from quadriga.engines.attention.kernels import gather_tokens

PLAIN = {
    "grouped": Sizes(),
    "one key head": Sizes(heads=3, key_heads=1),
    "own key heads": Sizes(heads=2, key_heads=2, scaling=0.7),
    "odd size": Sizes(size=5, value_size=5),
    "smaller values": Sizes(size=12, value_size=8),
    "larger values": Sizes(size=4, value_size=9),
    "window": Sizes(kind="window"),
    "window of one": Sizes(kind="window", local=1),
    "window of all": Sizes(kind="window", local=400),
}
SPECIAL = {
    "chunks": Sizes(kind="chunk"),
    "capped": Sizes(softcap=1.5),
    "capped window": Sizes(softcap=1.5, kind="window", heads=2),
    "sinks": Sizes(sinks=True),
    "sinks window": Sizes(sinks=True, kind="window", size=5, value_size=7, scaling=0.3),
}
SMALL = [name for name in ROWS if name != "more than two blocks"]


@pytest.fixture
def naive_flash(monkeypatch):
    monkeypatch.setattr(kernels, "varlen_attn", cases.naive_flash)


@pytest.fixture
def flex_backward(monkeypatch):
    """Let flex attention compute gradients on a CPU."""
    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(kernels, "compiled", lambda: flex_module.flex_attention)


@pytest.mark.parametrize("sizes", [*PLAIN.values(), *SPECIAL.values()], ids=[*PLAIN, *SPECIAL])
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("split", [True, False], ids=["split", "whole rows"])
def test_sdpa_equals_the_naive_loop(name, sizes, split):
    def compute(*arguments):
        return cases.computed("sdpa", *arguments, split=split)

    cases.assert_same(cases.packed_rows(ROWS[name]), sizes, compute)


@pytest.mark.parametrize("sizes", PLAIN.values(), ids=PLAIN)
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("share", [True, False], ids=["shared", "repeated"])
def test_varlen_equals_the_naive_loop(name, sizes, share, naive_flash):
    def compute(*arguments):
        return cases.computed("varlen", *arguments)

    cases.assert_same(cases.packed_rows(ROWS[name], share=share), sizes, compute)


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [*PLAIN.values(), *SPECIAL.values()], ids=[*PLAIN, *SPECIAL])
@pytest.mark.parametrize("name", ROWS)
def test_flex_equals_the_naive_loop(name, sizes, flex_backward):
    if name == "more than two blocks" and sizes not in (*SPECIAL.values(), Sizes()):
        pytest.skip("one sizes of a plain mask are enough for 300 tokens")

    def compute(*arguments):
        return cases.computed("flex", *arguments)

    cases.assert_same(cases.packed_rows(ROWS[name]), sizes, compute)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["capped", "capped window"])
def test_compiled_flex_in_a_checkpointed_layer_equals_the_naive_loop(name, monkeypatch):
    """Torch 2.13 computes wrong gradients there without compilation."""
    kernel = cases.compiled_for_cpu()
    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(kernels, "compiled", lambda: kernel)

    def compute(*arguments):
        return checkpoint(cases.computed, "flex", *arguments, use_reentrant=False)

    cases.assert_same(cases.packed_rows(ROWS["shared"]), SPECIAL[name], compute)


class AddedDtypes(TorchDispatchMode):
    """Records the dtypes of the sums that operators add rows to."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "index_add" in func.name():
            self.found.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_gradients_of_shared_tokens_are_added_in_float32(dtype):
    """Accelerators round each addition to the dtype of the sum; a CPU does not."""
    tokens = torch.randn(3, 1, 4, dtype=dtype).requires_grad_()
    slots = torch.tensor([0, 1, 0, 2, 0])
    weights = torch.randn(5, 1, 4, dtype=dtype)
    with AddedDtypes() as added:
        (gather_tokens(tokens, slots) * weights).sum().backward()
    assert added.found == {torch.float32}
    expected = torch.zeros(3, 1, 4).index_add(0, slots, weights.float()).to(dtype)
    assert torch.equal(tokens.grad, expected)
