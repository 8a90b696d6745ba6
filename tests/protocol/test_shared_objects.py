"""Parts of several ranks in one object, and parts that several calls send unchanged."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_small_fields import CountingStore

from quadriga.protocol import DataProto, boundary
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


def test_an_unchanged_tensor_is_stored_once(monkeypatch):
    x, store = torch.zeros(4, 2**18), CountingStore()
    for write, expected in (
        (lambda x: None, 2),  # both parts are stored
        (lambda x: None, 0),
        (lambda x: x.add_(1), 2),
        (lambda x: x[3].mul_(-0.0), 1),  # a view of the second part
        (lambda x: x.numpy().fill(-0.0), 2),  # torch does not count this write
        (lambda x: x.data[0, 7:].fill_(0.0), 1),
        (lambda x: None, 0),
    ):
        write(x)
        before = sum(map(len, store.objects))
        packed = pack_arguments(DataProto.from_dict({"x": x}).chunk(2), store)
        assert sum(map(len, store.objects)) - before == expected
        received = torch.cat([unpack_argument(part).batch["x"] for part in packed])
        assert torch.equal(received.view(torch.int32), x.view(torch.int32))
    monkeypatch.setattr(boundary, "SENT_BYTES", 5 * 2**20)  # for the whole tensor or its parts
    pack_arguments([DataProto.from_dict({"x": x})], store)
    assert len(boundary._sent[x.untyped_storage()]) == 1
    large = torch.zeros(6, 2**18)
    pack_arguments([DataProto.from_dict({"x": large})], store)
    assert large.untyped_storage() not in boundary._sent
    memories = len(boundary._sent)
    del x
    assert len(boundary._sent) == memories - 1


def test_threads_keep_what_they_send():
    """Each thread adds to the table that another one adds up."""
    fields = [torch.zeros(1, 300_000) for _ in range(60)]

    def send(own):
        for field in own:
            pack_arguments([DataProto.from_dict({"x": field})], CountingStore())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(send, [fields[i::4] for i in range(4)]))
    finally:
        sys.setswitchinterval(interval)
