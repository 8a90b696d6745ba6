"""Each attention kernel against a naive loop over single tokens, in float64.

The flash kernel runs on CUDA devices only, so a function with its arguments stands for it. Flex
attention is not compiled here; torch refuses its backward pass on a CPU, but can compute it.
"""

from __future__ import annotations

import attention_cases as cases
import pytest
import torch
from attention_cases import ROWS, Sizes
from torch.nn.attention import flex_attention as flex_module
from torch.utils._python_dispatch import TorchDispatchMode

from quadriga.engines.attention import flex, kernels
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
    monkeypatch.setattr(flex, "compiled", lambda signature: flex_module.flex_attention)


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


@pytest.mark.parametrize("sizes", [*PLAIN.values(), *SPECIAL.values()], ids=[*PLAIN, *SPECIAL])
@pytest.mark.parametrize("name", ROWS)
def test_flex_equals_the_naive_loop(name, sizes, flex_backward):
    if name == "more than two blocks" and sizes not in (*SPECIAL.values(), Sizes()):
        pytest.skip("one sizes of a plain mask are enough for 300 tokens")

    def compute(*arguments):
        return cases.computed("flex", *arguments)

    cases.assert_same(cases.packed_rows(ROWS[name]), sizes, compute)


def test_flex_without_shared_prompts(flex_backward):
    rows = cases.packed_rows(ROWS["shared"], share=False)
    assert len(rows.row) == int(rows.length.sum())
    cases.assert_same(rows, Sizes(), lambda *a: cases.computed("flex", *a))


def test_lengths_by_hand():
    """The example in `kernels.py`."""
    rows = cases.packed_rows([(0, 2, 2), (0, 2, 1), (1, 3, 3)])
    found = kernels.RowLengths.of(rows, cases.CPU)
    assert found.query_ends.tolist() == [0, 4, 5, 11]
    assert found.key_ends.tolist() == [0, 4, 7, 13]
    assert found.keys.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 8, 9, 10]
    assert (found.most_queries, found.most_keys) == (6, 6)
    repeated = cases.packed_rows([(0, 2, 2), (0, 2, 1)], share=False)
    assert kernels.RowLengths.of(repeated, cases.CPU).keys is None


def test_ranges_by_hand():
    """The example in `flex.py`."""
    rows = cases.packed_rows([(0, 2, 2), (0, 2, 1), (1, 3, 3)])
    ranges = flex.TokenRanges(rows, cases.CPU)
    own_first, prompt_first, prompt_last = (x.tolist() for x in ranges.ranges("window", 3))
    assert own_first[:11] == [0, 0, 0, 1, 4, 5, 5, 5, 6, 7, 8]
    assert [(i, prompt_first[i], n) for i, n in enumerate(prompt_last) if n] == [(4, 0, 2)]
    assert own_first[11:] == list(range(11, 256))  # padding attends to itself


LONG = [(0, 300, 200), (0, 300, 150), (1, 20, 400)]  # rows that fill blocks


@pytest.mark.parametrize("lengths", [*ROWS.values(), LONG], ids=[*ROWS, "long rows"])
@pytest.mark.parametrize("kind", ["causal", "window", "chunk"])
def test_blocks_of_the_mask_are_those_of_all_pairs(lengths, kind, monkeypatch):
    """Kernels of accelerators read these tables; operators on a CPU read the function only."""
    monkeypatch.setattr(flex, "_SLICE", 300 * 128)  # one block of queries at a time
    ranges = flex.TokenRanges(cases.packed_rows(lengths), cases.CPU)
    found = ranges.block_mask(cases.local_mask(Sizes(kind=kind, local=260)))
    expected = flex_module.create_block_mask(
        found.mask_mod, None, None, ranges.padded, ranges.padded, device="cpu"
    )
    for table in ("kv", "full_kv", "q", "full_q"):
        assert blocks_of(found, table) == blocks_of(expected, table)
    assert ranges.block_mask(cases.local_mask(Sizes(kind=kind, local=260))) is found
    assert bool(found.full_kv_num_blocks.sum()) is (lengths is LONG)


def blocks_of(mask, table):
    """Return for each row of blocks the set of blocks in a table of a block mask."""
    counts, indices = getattr(mask, f"{table}_num_blocks"), getattr(mask, f"{table}_indices")
    rows = zip(counts[0, 0].tolist(), indices[0, 0].tolist(), strict=True)
    return [set(row[:count]) for count, row in rows]


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
