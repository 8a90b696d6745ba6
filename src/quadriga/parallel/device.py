"""The device, the dtype and the collective library of a rank."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal, TypeVar

import psutil
import torch

from quadriga.config.paths import Dataclass
from quadriga.config.schema import DtypeName, RunConfig
from quadriga.errors import ConfigError, PlacementError

RecordT = TypeVar("RecordT", bound=Dataclass)

_ROUNDED = "pinned_max_round_threshold_mb"
"""The setting of torch's allocator: pinned memory above it is not rounded to a power of 2."""

DeviceType = Literal["cpu", "cuda", "npu"]
"""A device type of torch that Quadriga runs on."""

ComputeDtypeName = DtypeName | Literal["float64"]
"""A dtype of the settings, or float64, which tests of exactness use."""

DTYPES: Mapping[ComputeDtypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
"""Name -> dtype, without "auto"."""

STORED_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Name in a safetensors file -> dtype, of those that models and checkpoints hold."""

# Accelerator ranks also get gloo, because small Python objects are gathered on the CPU.
_COLLECTIVE_BACKENDS: Mapping[str, str] = {
    "cpu": "gloo",
    "cuda": "cpu:gloo,cuda:nccl",
    "npu": "cpu:gloo,npu:hccl",
}


def get_device_name() -> DeviceType:
    """Return the best device type that this process can see: "cuda", "npu" or "cpu"."""
    if torch.cuda.is_available():
        return "cuda"
    npu = getattr(torch, "npu", None)  # torch_npu adds this attribute when it is imported
    if npu is not None and npu.is_available():
        return "npu"
    return "cpu"


def planned_device(trainer: RunConfig) -> str | None:
    """Return the type of device on which the ranks compute. None: only the cluster knows."""
    if trainer.device != "auto":
        return trainer.device
    seen = get_device_name()
    # The controller may be on a node of a cluster without a device, and the ranks on others.
    return None if seen == "cpu" and ranks_are_elsewhere(trainer) else seen


def ranks_are_elsewhere(trainer: RunConfig) -> bool:
    """Return whether some ranks can be on other machines."""
    return trainer.backend == "ray" and (trainer.nnodes > 1 or "RAY_ADDRESS" in os.environ)


def torch_device(name: str, local_rank: int = 0) -> torch.device:
    """Return the torch device of the rank with number `local_rank` on its node.

    The process may see one device or all devices of the node. Raises what `collective_backend`
    raises.
    """
    _check_visible(name)
    if name == "cpu":
        return torch.device("cpu")
    # Local rank 3 of 4: the process sees all 4 devices -> 3 % 4 = 3, the fourth device;
    # it sees only its own (CUDA_VISIBLE_DEVICES=3) -> 3 % 1 = 0, the first visible device.
    visible: int = getattr(torch, name).device_count()
    return torch.device(name, local_rank % visible)


def collective_backend(name: str) -> str:
    """Return the `backend` argument of `torch.distributed.init_process_group` for a device type.

    Raises:
        PlacementError: this process cannot see such a device.
    """
    _check_visible(name)
    return _COLLECTIVE_BACKENDS[name]


def _check_visible(name: str) -> None:
    available = get_device_name()
    if name not in ("cpu", available):
        raise PlacementError(
            f"device {name!r} was requested, but the best device that this process can see is "
            f"{available!r}; set trainer.device=auto or make the device visible",
            wanted=name,
            available=available,
        )


def compute_dtype(name: ComputeDtypeName, device: torch.device) -> torch.dtype:
    """Return the dtype that a setting names. "auto" is float32 on a CPU and bfloat16 elsewhere.

    Raises:
        ConfigError: `name` is not a `ComputeDtypeName`.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}; expected auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def on_device(record: RecordT, device: torch.device) -> RecordT:
    """Return a dataclass with its tensors on `device`. Records inside it are left alone."""
    tensors = {n: x for n, x in vars(record).items() if isinstance(x, torch.Tensor)}
    moved = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
    return replace(record, **moved)


def used_memory(device: torch.device) -> int:
    """Return the bytes in use of a device, by all processes; of the CPU: by this process.

    The caching allocator of torch counts only its own memory, and that of a rollout engine which
    sleeps and wakes is another one. The driver of the device counts both.
    """
    if device.type == "cpu":
        return int(psutil.Process().memory_info().rss)
    free, total = getattr(torch, device.type).mem_get_info(device)
    return int(total - free)


def host_empty(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
    """Return host memory for copies from a device, which are fast to pinned memory."""
    if pinned:
        _pin_bytes_as_asked()
    return torch.empty(shape, dtype=dtype, pin_memory=pinned)


@cache
def _pin_bytes_as_asked() -> None:
    """Let torch pin as many bytes as a tensor has: it rounds 33 GB up to 64 GB by itself."""
    allocator: Any = torch._C  # these functions have no public name
    given = allocator._accelerator_getAllocatorSettings()
    if _ROUNDED not in given:
        new = f"{_ROUNDED}:1"  # MiB
        allocator._accelerator_setAllocatorSettings(f"{given},{new}" if given else new)
