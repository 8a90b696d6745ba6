"""Batches in files: equal when they are loaded, local and remote ones.

`tests/security/test_batch_files.py` has files from others.
"""

import datetime
import os
from fractions import Fraction

import numpy as np
import pytest
import torch
from protocol_cases import shard
from tensordict import NonTensorData, NonTensorStack, TensorDict

from quadriga.errors import FieldError
from quadriga.protocol import DataProto
from quadriga.protocol.values import build_jagged, same

NUMBERS = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?", "c8"]
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
]  # fmt: skip


def full() -> DataProto:
    values = torch.arange(12.0).reshape(3, 4)
    rag = torch.nested.nested_tensor([torch.ones(i) for i in (1, 0, 2)], layout=torch.jagged)
    items = [float("nan"), -0.0, 1e300, 2**70, "\ud800ü\0", {"a": [None, True]}]
    objects = np.empty((3, 2), dtype=object)
    objects.ravel()[:] = items
    numbers = {dtype: np.arange(3).astype(dtype) for dtype in NUMBERS}
    return DataProto.from_dict(
        {
            **{f"t{i}": torch.tensor([1, 0, 1]).to(dtype) for i, dtype in enumerate(DTYPES)},
            "transposed": values.T[:3],
            "no columns": torch.empty(3, 0),
            "no rows of numbers": rag,
            "positions": build_jagged(torch.arange(12).reshape(4, 3), torch.tensor([0, 1, 1, 4])),
            "ragged 2": build_jagged(torch.arange(8).reshape(4, 2), torch.tensor([0, 1, 1, 4]), 2),
            "sub": TensorDict({"k": torch.arange(3), "in": TensorDict({"r": rag}, [3])}, [3]),
            "\ud800/": torch.zeros(3, dtype=torch.bool),
        },
        {
            **numbers, "text": np.array([["a\0b", ""], ["ü😀", "x"], ["", "\ud800"]]),
            "objects": objects, "rows": [{"role": "user", "content": ["hi"]}, 1, None],
            "strided": np.arange(6).reshape(3, 2)[:, 1],
        },
        {"deep": [{"t": [[1.5]]}], "name": "run", "none": None, "big": -(2**80)},
    )  # fmt: skip


def test_a_saved_batch_is_loaded_equal(tmp_path, store):
    original = full()
    bits = torch.randn(3, 2).bfloat16().view(torch.int16)
    for saved in (full(), shard(full(), 2)):
        path = tmp_path / "batch.bin"
        saved.batch["bits"] = bits.view(torch.bfloat16)
        saved.save_to_disk(path)
        back = DataProto.load_from_disk(str(path))
        assert list(back.batch.keys()) == list(saved.batch.keys())
        for key in original.batch.keys():  # noqa: SIM118
            assert same(back.batch[key], original.batch[key]), key
        assert torch.equal(back.batch["bits"].view(torch.int16), bits)
        assert list(back.non_tensor_batch) == list(original.non_tensor_batch)
        for key, value in original.non_tensor_batch.items():
            assert same(back.non_tensor_batch[key], value), key
        assert same(back.meta_info, original.meta_info)
        back.batch["bits"].zero_()
        back.non_tensor_batch["i8"][0] = 5
    assert sorted(os.listdir(tmp_path)) == ["batch.bin"]


@pytest.mark.parametrize("data", [DataProto(), DataProto.from_dict(non_tensors={"s": ["a"]})])
def test_batches_without_tensors_and_without_fields(tmp_path, data):
    data.save_to_disk(tmp_path / "x")
    back = DataProto.load_from_disk(tmp_path / "x")
    assert back.batch is None and len(back) == len(data)


class Custom:
    pass


DEEP: list = []
for _ in range(200):
    DEEP = [DEEP]
REFUSED = {
    "an object": ({"o": [1, Custom()]}, r"field 'o' contains a .*\.Custom"),
    "a fraction": ({"o": [[Fraction(1, 2)]]}, "field 'o' contains a fractions.Fraction"),
    "a date": ({"o": [datetime.date(2026, 1, 2)]}, "contains a datetime.date"),
    "a tuple": ({"o": [(1,)]}, "contains a tuple"),
    "a tensor in a row": ({"o": [{"t": torch.ones(1)}]}, "contains a torch.Tensor"),
    "a number of numpy": ({"o": [np.float64(1)]}, "contains a numpy.float64"),
    "a key that is a number": ({"o": [{1: 2}]}, "contains the key 1, which is no str"),
    "200 levels": ({"o": DEEP}, "more than 100 levels"),
    "dates": ({"o": np.array(["2026-01-02"], "M8[D]")}, r"an array of dtype dtype\('<M8\[D\]'\)"),
    "structures": ({"o": np.zeros(1, "i4,f4")}, "an array of dtype"),
    "big-endian numbers": ({"o": np.zeros(1, ">i4")}, "an array of dtype"),
    "a masked array": ({"o": np.ma.masked_array([1])}, r"contains a numpy\.ma.*MaskedArray"),
    "a stack of objects": ({"o": TensorDict({"s": NonTensorStack(NonTensorData("a"))}, [1])},
                           r"field 'o\.s' contains a .*NonTensorStack"),
    "complex128": ({"o": torch.zeros(1, dtype=torch.complex128)}, "torch.complex128"),
    "a sparse tensor": ({"o": torch.eye(2).to_sparse()}, "layout torch.sparse_coo"),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_other_values_are_refused_by_name_before_the_file_is_written(reason, tmp_path):
    fields, message = REFUSED[reason]
    DataProto().save_to_disk(tmp_path / "x")
    with pytest.raises(FieldError, match=message):
        DataProto.from_single_dict(fields).save_to_disk(tmp_path / "x")
    assert len(DataProto.load_from_disk(tmp_path / "x")) == 0 and os.listdir(tmp_path) == ["x"]


def test_settings_that_are_no_json_are_refused_by_name(tmp_path):
    for meta in ({"a": {1, 2}}, {1: 2}, {"i": 10**5000}):
        with pytest.raises(FieldError, match=r"meta_info\['a'\] contains a set|key 1|as JSON"):
            DataProto(meta_info=meta).save_to_disk(tmp_path / "x")
    assert os.listdir(tmp_path) == []
