"""Devices, dtypes, and process groups of one rank."""

import pytest
import torch

from quadriga.errors import CollectiveError, ConfigError, PlacementError
from quadriga.parallel import device, distributed

CPU = torch.device("cpu")


def test_device_names_and_collective_backends():
    assert device.torch_device("cpu", 5) == CPU
    assert device.collective_backend("cpu") == "gloo"
    if device.get_device_name() != "npu":
        with pytest.raises(PlacementError, match="npu"):
            device.torch_device("npu")


def test_compute_dtype():
    assert device.compute_dtype("auto", CPU) is torch.float32
    assert device.compute_dtype("auto", torch.device("cuda")) is torch.bfloat16
    assert device.compute_dtype("float64", CPU) is torch.float64
    for wrong in ("int8", "float33", "nn"):
        with pytest.raises(ConfigError, match=wrong):
            device.compute_dtype(wrong, CPU)


def test_reductions_without_process_group():
    assert distributed.sum_over_ranks([1.5, 2.0], CPU) == [1.5, 2.0]
    assert distributed.max_over_ranks(3, CPU) == 3
    assert distributed.sum_metrics_over_ranks({"a": 1.0}) == {"a": 1.0}


def test_several_ranks_need_an_address(monkeypatch):
    monkeypatch.setattr(distributed.dist, "is_initialized", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(CollectiveError, match="MASTER_ADDR"):
        distributed.init_distributed()


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "RANK", "MASTER_PORT"])
def test_a_variable_of_a_launcher_that_is_no_number_is_named(monkeypatch, variable):
    set_by_launcher = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in {**set_by_launcher, variable: "many"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(CollectiveError, match=f"{variable} must be a whole number, got 'many'"):
        distributed.init_distributed("cpu")


def test_the_engines_of_a_process_share_the_groups_of_a_mesh():
    sizes = {"replicate": 1, "shard": 1}
    distributed.init_distributed()
    mesh = distributed.device_mesh("cpu", sizes)
    assert distributed.device_mesh("cpu", sizes) is mesh
    assert distributed.device_mesh("cpu", {"shard": 1}) is not mesh
    torch.distributed.destroy_process_group()
    distributed.init_distributed()
    assert distributed.device_mesh("cpu", sizes) is not mesh
