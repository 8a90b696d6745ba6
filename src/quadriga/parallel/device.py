"""Which device a rank computes on, and which library its ranks talk through."""

from __future__ import annotations

import torch

from quadriga.errors import ConfigError, PlacementError

_COLLECTIVES = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}


def get_device_name() -> str:
    """The best device kind of this process: "cuda", "npu" or "cpu"."""
    if torch.cuda.is_available():
        return "cuda"
    npu = getattr(torch, "npu", None)  # there once torch_npu is installed
    if npu is not None and npu.is_available():
        return "npu"
    return "cpu"


def resolve_device_name(name: str) -> str:
    """`name` itself, or the best device kind when it is "auto".

    Raises `ConfigError` for a kind that does not exist, `PlacementError` for one this process
    cannot see.
    """
    if name == "auto":
        return get_device_name()
    if name not in _COLLECTIVES:
        raise ConfigError(f"trainer.device is {name!r}; expected auto, cpu, cuda or npu")
    if name != "cpu" and get_device_name() != name:
        raise PlacementError(
            f"device {name!r} was asked for, but this process sees only "
            f"{get_device_name()!r}; set trainer.device=auto or make the device visible",
            wanted=name,
            available=get_device_name(),
        )
    return name


def torch_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of a rank. Works whether the process sees one device or the whole node's."""
    name = resolve_device_name(name)
    if name == "cpu":
        return torch.device("cpu")
    visible = getattr(torch, name).device_count()
    return torch.device(name, local_rank % visible)


def collective_backend(name: str) -> str:
    """The backend string of `torch.distributed.init_process_group` for a device kind."""
    return _COLLECTIVES[resolve_device_name(name)]


def set_threads(count: int) -> None:
    """CPU threads of one operator in this process. Raises `ConfigError` below 1."""
    if count < 1:
        raise ConfigError(f"threads per worker must be at least 1, got {count}")
    torch.set_num_threads(count)


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype a setting names: "auto" is bfloat16 on an accelerator and float32 on CPU.

    Raises `ConfigError` for a name that is no floating dtype of torch.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(
            f"dtype {name!r} is not known; expected auto, float32, bfloat16, float16 or float64"
        )
    return dtype
