"""verl's questions about the accelerator, over PyTorch's."""

from __future__ import annotations

import os
from typing import Any

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
    """Whether an Ascend device can be used (`check_device=False`: whether its library is there)."""
    npu = getattr(torch, "npu", None)
    return npu is not None and (not check_device or bool(npu.is_available()))


is_npu_available = is_torch_npu_available()


def get_torch_device() -> Any:
    """The module of torch for the device kind: `torch.cuda`, `torch.npu`, `torch.cpu`."""
    return getattr(torch, get_device_name())


def get_device_id() -> int:
    """Index of the current device; 0 on CPU."""
    return 0 if get_device_name() == "cpu" else int(get_torch_device().current_device())


def get_nccl_backend() -> str:
    """The collective library of the device kind."""
    return _COLLECTIVES[get_device_name()]


def get_resource_name() -> str:
    """What Ray calls the device kind."""
    return _RESOURCES[get_device_name()]


def get_visible_devices_keyword() -> str:
    """The variable that lists the visible devices."""
    return _VARIABLES[get_device_name()]


def get_vendor() -> str:
    """Who made the device: nvidia, amd, ascend or cpu."""
    name = get_device_name()
    if name == "cuda":
        return "amd" if torch.version.hip else "nvidia"
    return "ascend" if name == "npu" else "cpu"


def get_device_capability(device_id: int = 0) -> tuple[int | None, int | None]:
    """(major, minor) of a CUDA device; (None, None) elsewhere."""
    if get_device_name() != "cuda":
        return None, None
    major, minor = torch.cuda.get_device_capability(device_id)
    return major, minor


def is_device_available() -> bool:
    """Whether there is any accelerator."""
    return get_device_name() != "cpu"


def is_support_ipc() -> bool:
    """Whether processes can share device memory."""
    return get_device_name() == "cuda"


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    device = get_torch_device()
    getattr(device, "manual_seed", torch.manual_seed)(seed)


def manual_seed_all(seed: int) -> None:
    """Seed all devices."""
    device = get_torch_device()
    getattr(device, "manual_seed_all", torch.manual_seed)(seed)


def set_expandable_segments(enable: bool) -> None:
    """Let CUDA's allocator grow its segments; nothing on other devices."""
    if get_device_name() == "cuda":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = f"expandable_segments:{enable}"


def auto_set_device(config: Any) -> None:
    """Write the device kind into `config.trainer.device` where it names another accelerator."""
    trainer = getattr(config, "trainer", None)
    if trainer is not None and getattr(trainer, "device", "auto") not in ("cpu", get_device_name()):
        trainer.device = get_device_name()
