"""Devices, digests, and a group of one."""

from __future__ import annotations

import pytest
import torch

from quadriga.errors import CollectiveError, ConfigError, PlacementError
from quadriga.parallel import distributed
from quadriga.parallel.device import (
    collective_backend,
    compute_dtype,
    get_device_name,
    resolve_device_name,
    set_threads,
    torch_device,
)
from quadriga.parallel.digest import tensor_digest

CPU = torch.device("cpu")


def test_devices():
    assert resolve_device_name("auto") == get_device_name()
    assert torch_device("cpu", 5) == CPU
    assert collective_backend("cpu") == "gloo"
    with pytest.raises(ConfigError, match="tpu"):
        resolve_device_name("tpu")
    if get_device_name() != "npu":
        with pytest.raises(PlacementError, match="npu"):
            torch_device("npu")
    with pytest.raises(ConfigError, match="at least 1"):
        set_threads(0)


def test_dtypes():
    assert compute_dtype("auto", CPU) is torch.float32
    assert compute_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert compute_dtype("float64", CPU) is torch.float64
    for wrong in ("int8", "float33", "nn"):
        with pytest.raises(ConfigError, match=wrong):
            compute_dtype(wrong, CPU)


def test_outside_a_group_a_process_is_alone():
    assert distributed.sum_over_ranks([1.5, 2.0], CPU) == [1.5, 2.0]
    assert distributed.max_over_ranks(3, CPU) == 3
    assert distributed.sum_metrics_over_ranks({"a": 1.0}) == {"a": 1.0}


def test_an_address_is_needed_for_several(monkeypatch):
    monkeypatch.setattr(distributed.dist, "is_initialized", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(CollectiveError, match="MASTER_ADDR"):
        distributed.init_distributed()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_digest_tells_tensors_apart(dtype):
    base = torch.arange(1, 13).view(3, 4).to(dtype)
    same = base.t().contiguous().t()
    changed, swapped = base.clone(), base.clone()
    changed[2, 1] += 1
    swapped[0, 0], swapped[0, 1] = base[0, 1], base[0, 0]
    assert tensor_digest(base) == tensor_digest(same)
    digests = [tensor_digest(t) for t in (base, changed, swapped, base.flatten()[:-1])]
    assert len(set(digests)) == 4


def test_digest_of_zeros_and_of_nothing():
    assert tensor_digest(torch.zeros(3)) != tensor_digest(torch.zeros(4))
    assert tensor_digest(torch.zeros(0)) == 0
