"""A program that sets the default device and dtype of torch receives its batches unchanged.

`torch.set_default_device("cuda")` in a worker is the usual case. The meta device stands for it: a
tensor that is made there by mistake has no values.
"""

import numpy as np
import pytest
import torch
from test_small_fields import RANK, CountingStore

from quadriga.protocol import DataProto
from quadriga.protocol.boundary import pack_argument, pack_result, unpack_argument, unpack_result
from quadriga.protocol.values import same


@pytest.fixture
def defaults():
    """Call it to set the defaults, which end with the test."""

    def change():
        torch.set_default_device("meta")
        torch.set_default_dtype(torch.float64)

    yield change
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def batch() -> DataProto:
    rows = [torch.full((500 * (1 + i),), float(i)) for i in range(4)]
    fields = {
        "small": torch.arange(400).reshape(4, -1),
        "large": torch.randn(4, 100_000),
        "narrow": torch.randn(4, 9).to(torch.bfloat16),
        "ragged": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "empty": torch.zeros(4, 0),
    }
    return DataProto.from_dict(fields, non_tensors={"n": np.arange(4.0), "o": ["a", 1, None, {}]})


def argument(data, tmp_path):
    return unpack_argument(pack_argument(data, CountingStore()))


def result(data, tmp_path):
    return unpack_result(pack_result(data, RANK, CountingStore()))


def file(data, tmp_path):
    data.save_to_disk(str(tmp_path / "batch"))
    return DataProto.load_from_disk(str(tmp_path / "batch"))


@pytest.mark.parametrize("way", [argument, result, file])
def test_fields_arrive_on_the_cpu(defaults, tmp_path, way):
    data, value = batch(), torch.arange(70_000)
    expected = data[[3, 1, 1]].repeat(2).batch
    defaults()
    arrived = way(data, tmp_path)[[3, 1, 1]].repeat(2)
    for key in data.batch.keys():  # noqa: SIM118
        assert same(arrived.batch[key], expected[key]), key
    (found,) = unpack_argument(pack_argument([value], CountingStore()))
    assert torch.equal(found, value)
