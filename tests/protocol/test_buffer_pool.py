"""Memory of large tensors is released with the last view of it, and never before."""

import gc

import pytest
import torch

from quadriga.protocol import values
from quadriga.protocol.values import Pool, pooled_empty

MIB = 2**20


@pytest.fixture
def pool(monkeypatch):
    new = Pool(kept_bytes=8 * MIB)
    monkeypatch.setattr(values, "_pool", new)
    return new


def test_memory_is_used_again_after_its_tensor_is_dropped(pool):
    first = pooled_empty((MIB,), torch.int32)
    address = first.data_ptr()
    assert address % 64 == 0
    del first
    assert pool.kept_bytes == 4 * MIB
    again = pooled_empty((MIB // 2,), torch.int64)
    assert again.data_ptr() == address and pool.kept_bytes == 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("view_of", "numbers"),
    [
        (lambda tensor: tensor[5:7], lambda view: view.tolist()),
        (lambda tensor: tensor.view(torch.int16)[-4::2].numpy(), lambda view: view.tolist()),
        (
            lambda tensor: torch.nested.nested_tensor_from_jagged(
                tensor, torch.tensor([0, 2, len(tensor)])
            ),
            lambda view: view.values()[:2].tolist(),
        ),
    ],
    ids=["slice", "numpy of another dtype", "jagged"],
)
def test_a_view_keeps_the_memory(pool, view_of, numbers):
    tensor = pooled_empty((MIB,), torch.int32).fill_(7)
    view = view_of(tensor)
    del tensor
    gc.collect()
    assert pool.kept_bytes == 0
    pooled_empty((MIB,), torch.int32).fill_(0)  # must use other memory
    assert numbers(view) == [7, 7]
    before = pool.kept_bytes
    del view
    gc.collect()
    assert (before, pool.kept_bytes) == (4 * MIB, 8 * MIB)
