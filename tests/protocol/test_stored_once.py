"""Local fields are stored once while they are unchanged."""

from __future__ import annotations

import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from quadriga.protocol import DataProto, columns
from quadriga.protocol.boundary import pack_argument, unpack_argument
from quadriga.protocol.columns import _Kept, _parts, _sources, note_part, remember_stored
from quadriga.protocol.encoding import encode
from quadriga.protocol.rows import RowRange
from quadriga.protocol.storage import InProcessStore, traffic
from quadriga.protocol.values import clone_value, same

JAGGED = torch.nested.nested_tensor([torch.ones(i + 1) for i in range(4)], layout=torch.jagged)
VALUES = {
    "tensor": torch.arange(8.0).view(4, 2),
    "of numpy": torch.from_numpy(np.arange(4)),
    "bfloat16": torch.ones(4, 3).bfloat16(),
    "jagged": JAGGED,
    "tree": TensorDict({"a": torch.arange(4)}, [4]),
}


def stored_by(data: DataProto, parts: int, store=None) -> int:
    """Return the bytes that one call stores for a batch in `parts` parts; check what arrives."""
    traffic.reset()
    received = [unpack_argument(pack_argument(part, store)) for part in data.chunk(parts)]
    stored = traffic.reset().stored_bytes
    joined = DataProto.concat(received)
    for key in [] if data.batch is None else data.batch.keys():
        assert same(joined.batch[key], clone_value(data.batch[key]))
    for key in data.non_tensor_batch:
        assert same(joined.non_tensor_batch[key], data.non_tensor_batch[key])
    return stored


@pytest.mark.parametrize("kind", VALUES)
def test_four_calls_store_the_bytes_once(store, kind):
    data = DataProto.from_dict({"v": clone_value(VALUES[kind])})
    first = stored_by(data, 2)
    assert first > 0 and [stored_by(data, 2) for _ in range(3)] == [0, 0, 0]
    assert stored_by(data.select(["v"]).rename("v", "w"), 2) == 0
    assert stored_by(data, 1) > 0 and stored_by(data, 1) == 0


def test_arrays_are_stored_once(store):
    data = DataProto.from_dict(non_tensors={"n": np.arange(4.0), "o": [{"k": 1}, 2, "c", None]})
    assert stored_by(data, 2) > 0 and stored_by(data, 2) == 0
    data.non_tensor_batch["o"][0]["k"] = 2
    assert 0 < stored_by(data, 2) < 200


WRITES = {
    "in place": lambda x: x.add_(1),
    "through a view": lambda x: x[3:].zero_(),
    "through data": lambda x: x.data.add_(1),
    "through numpy": lambda x: x.numpy().__setitem__(3, 7.0),
    "not a number": lambda x: x.data[3].fill_(float("nan")),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_changed_tensor_is_stored_again(store, write):
    data = DataProto.from_dict({"x": torch.arange(4.0), "y": torch.arange(4.0)})
    assert stored_by(data, 2) == 32
    WRITES[write](data.batch["x"])
    assert stored_by(data, 2) in (8, 16) and stored_by(data, 2) == 0


def test_an_array_that_shares_memory_with_a_tensor_is_written(store):
    array = np.zeros(4)
    data = DataProto.from_dict({"x": torch.from_numpy(array)})
    stored_by(data, 2)
    array[1] = 5
    assert stored_by(data, 2) == 16


def test_stored_bytes_are_released_with_the_tensor(store):
    gc.collect()
    before = len(_sources), len(_parts)
    data = DataProto.from_dict({"x": torch.arange(4.0)})
    stored_by(data, 2)
    assert store.objects_held == 2
    stored_by(data, 1)
    stored_by(data, 4)
    assert store.bytes_held <= 2 * 16  # at most twice the bytes of the tensor are kept
    del data
    gc.collect()
    assert store.objects_held == 0
    assert (len(_sources), len(_parts)) == before


def test_a_part_of_a_long_tensor_does_not_keep_its_bytes_in_the_store(store):
    dataset = DataProto.from_dict({"x": torch.arange(100.0)})
    for start in range(0, 100, 10):
        step = dataset[start : start + 10]
        assert stored_by(step, 2) == 40 and stored_by(step, 2) == 0
    assert store.bytes_held <= 2 * 40


def test_the_oldest_stored_bytes_are_released_above_the_limit(store, monkeypatch):
    monkeypatch.setattr(columns, "KEPT_STORED_BYTES", 40)
    monkeypatch.setattr(columns, "_kept", _Kept())
    first, second = (DataProto.from_dict({"x": torch.arange(4.0)}) for _ in range(2))
    assert [stored_by(data, 1) for data in (first, second, first)] == [16, 16, 0]
    third = DataProto.from_dict({"x": torch.arange(4.0)})
    assert stored_by(third, 1) == 16 and store.bytes_held == 32
    assert [stored_by(data, 1) for data in (second, first)] == [0, 16]


def test_each_store_gets_its_own_copy(store):
    data = DataProto.from_dict({"x": torch.arange(4.0)})
    other = InProcessStore()
    assert stored_by(data, 2) == 16 and stored_by(data, 2, other) == 16
    assert stored_by(data, 2) == 0 and stored_by(data, 2, other) == 0


def test_inference_tensors_are_compared(store):
    with torch.inference_mode():
        data = DataProto.from_dict({"x": torch.arange(4.0)})
        assert stored_by(data, 2) == 16 and stored_by(data, 2) == 0
        data.batch["x"].add_(1)
        assert stored_by(data, 2) == 16


def test_threads_that_send_one_batch_note_its_rows_together(store, monkeypatch):
    """The numbers of bytes and rows that are kept stay right."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    value = torch.zeros(64, 4096)
    spec = encode(value, "v")[0]
    rows = [value[i : i + 8] for i in range(0, 64, 8)]
    for i, part in enumerate(rows):
        note_part(part, value, RowRange(8 * i, 8 * i + 8))
    monkeypatch.setattr(columns, "_kept", _Kept())

    def send(thread):
        for turn in range(200):
            part = rows[(thread + turn) % len(rows)]
            remember_stored(part, spec, store.put(0, 10), turn % 3)

    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(send, range(8)))
    finally:
        sys.setswitchinterval(interval)
    copies = _sources.get(value)
    assert copies.rows == sum(stop - start for _, (start, stop) in copies)
    assert columns._kept._nbytes == 8 * 200 * 10
