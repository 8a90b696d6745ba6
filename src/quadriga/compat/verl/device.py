"""verl's functions for the accelerator, based on PyTorch and `quadriga.parallel.device`."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Protocol

import torch

from quadriga.parallel.device import get_device_name

_RESOURCES = {"cuda": "GPU", "npu": "NPU", "cpu": "CPU"}
_VARIABLES = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "cpu": "CUDA_VISIBLE_DEVICES",
}
_COLLECTIVES = {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}

is_cuda_available = torch.cuda.is_available()


def is_torch_npu_available(check_device: bool = True) -> bool:
    """Return whether an Ascend device is available.

    With `check_device=False`, return whether torch_npu is imported.
    """
    npu = getattr(torch, "npu", None)
    return npu is not None and (not check_device or bool(npu.is_available()))


is_npu_available = is_torch_npu_available()


def get_torch_device() -> ModuleType:
    """Return the torch module of the device type: `torch.cuda`, `torch.npu` or `torch.cpu`."""
    module: ModuleType = getattr(torch, get_device_name())
    return module


def get_device_id() -> int:
    """Return the index of the current device, 0 on a CPU."""
    return 0 if get_device_name() == "cpu" else int(get_torch_device().current_device())


def get_nccl_backend() -> str:
    """Return the collective library of the device type: "nccl", "hccl" or "gloo"."""
    return _COLLECTIVES[get_device_name()]


def get_resource_name() -> str:
    """Return Ray's resource name of the device type: "GPU", "NPU" or "CPU"."""
    return _RESOURCES[get_device_name()]


def get_visible_devices_keyword() -> str:
    """Return the environment variable that lists the visible devices."""
    return _VARIABLES[get_device_name()]


def get_vendor() -> str:
    """Return the vendor of the device: "nvidia", "amd", "ascend" or "cpu"."""
    name = get_device_name()
    if name == "cuda":
        return "amd" if torch.version.hip else "nvidia"
    return "ascend" if name == "npu" else "cpu"


def get_device_capability(device_id: int = 0) -> tuple[int | None, int | None]:
    """Return (major, minor) of a CUDA device, (None, None) for other device types."""
    if get_device_name() != "cuda":
        return None, None
    major, minor = torch.cuda.get_device_capability(device_id)
    return major, minor


def is_device_available() -> bool:
    """Return whether this process can see an accelerator."""
    return get_device_name() != "cpu"


def is_support_ipc() -> bool:
    """Return whether processes can share device memory through IPC handles."""
    return get_device_name() == "cuda"


def manual_seed(seed: int) -> None:
    """Seed the random generator of the current device."""
    device = get_torch_device()
    getattr(device, "manual_seed", torch.manual_seed)(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the random generators of all devices."""
    device = get_torch_device()
    getattr(device, "manual_seed_all", torch.manual_seed)(seed)


def set_expandable_segments(enable: bool) -> None:
    """Set `expandable_segments` of the CUDA allocator. Other device types ignore it."""
    if get_device_name() == "cuda":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{enable}"


class _TrainerSettings(Protocol):
    device: str


def auto_set_device(config: object) -> None:
    """Set `config.trainer.device` to the device type of this process, unless it is "cpu"."""
    trainer: _TrainerSettings | None = getattr(config, "trainer", None)
    if trainer is not None and getattr(trainer, "device", "auto") not in ("cpu", get_device_name()):
        trainer.device = get_device_name()
