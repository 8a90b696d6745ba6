"""The tensors of a checkpoint are a safetensors file, written without a copy of all of them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from quadriga.checkpoint.files import digest_file, write_tensors
from quadriga.errors import CheckpointError


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
)
def test_the_written_tensors_are_those_that_safetensors_reads(tmp_path, dtype):
    tensors = {
        "a": torch.arange(6).view(2, 3).to(dtype),
        "transposed": torch.arange(6).view(2, 3).to(dtype).T,
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.zeros(0, 3, dtype=dtype),
        "other": torch.ones(3, dtype=torch.uint8),
    }
    saved = write_tensors(tmp_path / "x.safetensors", tensors, {"step": "3"})
    read = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert read.keys() == tensors.keys()
    assert saved.digest == digest_file(tmp_path / "x.safetensors")
    assert saved.size == (tmp_path / "x.safetensors").stat().st_size


def test_a_dtype_that_a_checkpoint_cannot_hold_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"'w' has dtype torch\.complex64"):
        write_tensors(tmp_path / "x.safetensors", {"w": torch.zeros(2, dtype=torch.complex64)})
