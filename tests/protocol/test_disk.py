"""Batches in files: equal when they are loaded, local and remote ones.

`test_disk_round_trips.py` has every type; `tests/security/test_batch_files.py` files from others.
"""

from __future__ import annotations

import datetime
import os

import numpy as np
import pytest
import torch
from PIL import Image
from protocol_cases import shard
from tensordict import NonTensorData, NonTensorStack, TensorDict

from quadriga.errors import FieldError
from quadriga.protocol import DataProto
from quadriga.protocol.values import operations


def full() -> DataProto:
    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    return DataProto.from_dict(
        {
            "half": torch.randn(3, 2).bfloat16(),
            "rag": torch.nested.nested_tensor(
                [torch.ones(i + 1, dtype=torch.complex64) for i in range(3)], layout=torch.jagged
            ),
            "sub": TensorDict({"k": torch.arange(3)}, [3]),
        },
        {
            "o": [{"t": torch.ones(2).bfloat16(), "s": {1, 2}}, None, datetime.date(2026, 1, 2)],
            "mixed": [np.float32(0.5), np.arange(3), picture],
            "n": np.arange(6).reshape(3, 2),
        },
        {"deep": [{"t": torch.tensor(1.5)}], "name": "run", "array": np.arange(3)},
    )


def test_a_saved_batch_is_loaded_equal(tmp_path, store):
    original = full()
    for data in (full, lambda: shard(full(), 2)):
        path = tmp_path / "batch.bin"
        saved = data()
        saved.batch["half"] = original.batch["half"]
        saved.save_to_disk(path)
        back = DataProto.load_from_disk(str(path))
        assert len(back) == 3 and len(back.union(original)) == 3
        assert back.batch["half"].dtype == torch.bfloat16
        back.batch["half"].zero_()
        back.non_tensor_batch["n"][0] = 5
        assert operations.same(back.meta_info, original.meta_info)
    assert sorted(os.listdir(tmp_path)) == ["batch.bin"]


@pytest.mark.parametrize("data", [DataProto(), DataProto.from_dict(non_tensors={"s": ["a"]})])
def test_batches_without_tensors_and_without_fields(tmp_path, data):
    data.save_to_disk(tmp_path / "x")
    back = DataProto.load_from_disk(tmp_path / "x")
    assert back.batch is None and len(back) == len(data)


class Custom:
    pass


def test_unsupported_types_are_refused_at_saving(tmp_path):
    data = DataProto.from_dict(non_tensors={"o": [1, Custom()]})
    path = tmp_path / "x"
    DataProto().save_to_disk(path)
    with pytest.raises(FieldError, match=r"field 'o' contains a .*Custom"):
        data.save_to_disk(path)
    assert len(DataProto.load_from_disk(path)) == 0 and os.listdir(tmp_path) == ["x"]


def test_stacks_of_too_many_rows_are_refused_at_saving(tmp_path, monkeypatch):
    monkeypatch.setattr("quadriga.protocol.batch_file.encode_values.MAX_STACK_ROWS", 10)
    stack = NonTensorStack(*[NonTensorData(str(row)) for row in range(6)])
    data = DataProto.from_dict({"x": torch.zeros(6)}, meta_info={"a": stack})
    data.save_to_disk(tmp_path / "batch")
    data.meta_info["b"] = stack
    with pytest.raises(FieldError, match=r"meta_info\['b'\].*more than 10 rows of NonTensorStack"):
        data.save_to_disk(tmp_path / "batch")
