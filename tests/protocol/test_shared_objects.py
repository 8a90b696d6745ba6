"""Small parts of several ranks of a node are stored in one object, and each rank reads its own."""

from __future__ import annotations

import pytest
import torch
from test_small_fields import CountingStore

from quadriga.protocol import DataProto
from quadriga.protocol.boundary import pack_arguments, unpack_argument

KB = 1024


def part(kib: int, value: int) -> DataProto:
    """Return a row with two fields, `kib` KiB together."""
    fields = {name: torch.full((1, kib * KB // 8), float(value)) for name in ("x", "y")}
    return DataProto.from_dict(fields)


@pytest.mark.parametrize(
    ("sizes", "readers", "objects"),
    [
        ([256] * 4, "aabb", [512, 512]),
        ([256] * 4, "abab", [256] * 4),
        ([256] * 9, "a" * 9, [8 * 256, 256]),
        ([256, 1024, 256], "aaa", [256 + 1024 + 256]),
        ([256, 1026, 256, 256], "aaaa", [256, 1026, 512]),
        ([256] * 3, ["", "", "a"], [256] * 3),
        ([16] * 3, "aaa", []),
    ],
    ids=["by node", "mixed", "eight at most", "limit", "above it", "several nodes", "in the call"],
)
def test_parts_share_objects(sizes, readers, objects):
    store = CountingStore()
    parts = [part(size, i) for i, size in enumerate(sizes)]
    packed = pack_arguments(parts, store, list(readers))
    assert [sum(sizes) // KB for sizes in store.objects] == objects
    for sent, value in zip(packed, parts, strict=True):
        received = unpack_argument(sent)
        assert all(torch.equal(received.batch[key], value.batch[key]) for key in ("x", "y"))
