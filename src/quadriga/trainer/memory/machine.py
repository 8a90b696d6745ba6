"""The memory that ranks can use: of a device, or of a machine whose ranks compute on the CPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from quadriga.config.schema import RunConfig

GIB = 2**30
SETTING = "trainer.device_memory_gb"
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
# Files of the limit, of the use, and of the part of the use that the kernel gives up when needed,
# for version 2 and version 1 of control groups.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True)
class DeviceLimit:
    """How much memory ranks can use.

    Attributes:
        size: bytes; of one rank on an accelerator, of all ranks of a node on a CPU.
        source: what says so.
    """

    size: int
    source: str


def planned_device(trainer: RunConfig) -> str | None:
    """Return the type of device on which the ranks compute. None: only the cluster knows."""
    from quadriga.parallel.device import get_device_name

    if trainer.device != "auto":
        return trainer.device
    seen = get_device_name()
    # The controller may be on a node of a cluster without a device, and the ranks on others.
    elsewhere = trainer.backend == "ray" and (trainer.nnodes > 1 or "RAY_ADDRESS" in os.environ)
    return None if seen == "cpu" and elsewhere else seen


def device_limit(trainer: RunConfig, device_type: str) -> DeviceLimit | None:
    """Return the memory that ranks can use. None: it is not known on this machine."""
    if trainer.device_memory_gb is not None:
        return DeviceLimit(int(trainer.device_memory_gb * GIB), SETTING)
    if device_type == "cpu":
        # Other nodes are taken to be like this one.
        return DeviceLimit(available_memory(), "available on this machine")
    import torch

    module = getattr(torch, device_type, None)
    if module is None or not module.is_available():
        return None
    properties = module.get_device_properties(0)
    return DeviceLimit(int(properties.total_memory), str(properties.name))


def gib(size: int) -> str:
    """Return bytes in GiB with three digits: "79.2", "0.0132"."""
    return f"{size / GIB:.3g}"


def gib_apart(needed: int, limit: int) -> tuple[str, str]:
    """Return two sizes as `gib` does, with as many digits as show which one is larger.

    80.04 and 80 GiB are "80.04" and "80", not twice "80".
    """
    for digits in range(3, 18):
        texts = f"{needed / GIB:.{digits}g}", f"{limit / GIB:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


def available_memory(groups: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> int:
    """Return the bytes that new processes of this machine, or of its control group, can use."""
    import psutil

    free = int(psutil.virtual_memory().available)
    return min([free, *(limit for folder in _folders(groups, own) for limit in _left(folder))])


def _folders(groups: Path, own: Path) -> list[Path]:
    """Return the folders that can hold the limit of this process."""
    # A line of /proc/self/cgroup is number:controllers:path, with number 0 in version 2. In a
    # container the path can be one of the host, and the files are in the top folder.
    lines = own.read_text().splitlines() if own.is_file() else []
    paths = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    memory = [path for _, kind, path in paths if kind in ("", "memory")]
    return [
        folder / path.lstrip("/")
        for folder in (groups, groups / "memory")
        for path in (*memory, "")
    ]


def _left(folder: Path) -> list[int]:
    """Return the limit of a control group less its use; [] if it has none."""
    for limit, use, reclaimable in _FILES:
        size, used = (_number(folder / name) for name in (limit, use))
        if size is not None and used is not None:
            statistics = folder / "memory.stat"
            rows = statistics.read_text().splitlines() if statistics.is_file() else []
            kept = dict(row.split(maxsplit=1) for row in rows)
            return [max(0, size - used + int(kept.get(reclaimable, 0)))]
    return []


def _number(file: Path) -> int | None:
    """Return the number in a file; None without a file, and for "max", which is no limit."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdecimal() else None
