"""int64 fields are sent in the fewest bytes that hold their numbers, and arrive as int64."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from test_small_fields import CountingStore

from quadriga.protocol import DataProto, message, use_store
from quadriga.protocol.boundary import pack_argument, pack_result, unpack_argument, unpack_result
from quadriga.protocol.storage import Origin, traffic


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingStore]:
    monkeypatch.setattr(message, "INLINE_BYTES", -1)
    store = CountingStore()
    with use_store(store):
        yield store


def send(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return what arrives, and the bytes that are stored."""
    traffic.reset()
    packed = pack_argument(DataProto.from_dict({"x": tensor}), CountingStore())
    stored = traffic.stored_bytes
    found = unpack_argument(packed).batch["x"]
    assert traffic.reset().fetched_bytes == stored
    return found, stored


LIMITS = [
    (-128, 127, 1), (0, 128, 2), (-129, 0, 2), (-(2**31), 2**31 - 1, 4), (-(2**31) - 1, 0, 8),
]  # fmt: skip


@pytest.mark.parametrize(("low", "high", "itemsize"), LIMITS)
def test_numbers_take_the_fewest_bytes_that_hold_them(low, high, itemsize, sent):
    tensor = torch.zeros(40, 100, dtype=torch.int64)
    tensor[39, 98], tensor[39, 99] = low, high  # behind the numbers that are looked at first
    found, stored = send(tensor)
    assert found.dtype == torch.int64 and torch.equal(found, tensor)
    assert stored == 40 * 100 * itemsize
    found.add_(1)
    assert tensor[0, 0] == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(40, 100),
        torch.ones(40, 100, dtype=torch.bool),
        torch.ones(40, 100, dtype=torch.int32),
        torch.ones(40, 2, dtype=torch.int64),
        torch.full((40, 100), 2**40),
        torch.zeros(0, 100, dtype=torch.int64),
    ],
    ids=["float32", "bool", "int32", "few", "large", "empty"],
)
def test_other_fields_are_sent_as_they_are(tensor, sent):
    found, stored = send(tensor)
    assert torch.equal(found, tensor) and found.dtype == tensor.dtype
    assert stored == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("rows", [3, 100])
def test_shards_of_different_sizes_are_one_field(rows, sent):
    """Ranks whose ids fit into 1, 2, 4 and 8 bytes; rows in any order, also one by one."""
    tops = (10, 1000, 2**20, 2**40)
    parts = [torch.full((rows, 200), top) + torch.arange(rows)[:, None] for top in tops]
    results = [
        unpack_result(pack_result(DataProto.from_dict({"x": part}), Origin("W", rank, "m")))
        for rank, part in enumerate(parts)
    ]
    traffic.reset()
    joined, expected = DataProto.concat(results), torch.cat(parts)
    order = torch.randperm(len(expected), generator=torch.Generator().manual_seed(0))
    joined.reorder(order)
    assert torch.equal(joined.batch["x"], expected[order])
    assert traffic.reset().fetched_bytes == rows * 200 * (1 + 2 + 4 + 8)


def test_numpy_arrays_keep_their_dtype(sent):
    array = np.arange(4000).reshape(40, 100)
    traffic.reset()
    packed = pack_argument(DataProto.from_dict(non_tensors={"x": array}))
    assert traffic.reset().stored_bytes == array.nbytes
    assert unpack_argument(packed).non_tensor_batch["x"].dtype == array.dtype
