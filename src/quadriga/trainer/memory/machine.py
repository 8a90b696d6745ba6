"""The memory that ranks can use: of a device, or of a machine whose ranks compute on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quadriga.config.schema import RunConfig

GIB = 2**30
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


def device_limit(trainer: RunConfig, device_type: str) -> DeviceLimit | None:
    """Return the memory that ranks can use. None: it is not known on this machine."""
    if trainer.device_memory_gb is not None:
        return DeviceLimit(int(trainer.device_memory_gb * GIB), "trainer.device_memory_gb")
    if device_type == "cpu":
        # Other nodes are taken to be like this one.
        return DeviceLimit(available_memory(), "available on this machine")
    import torch

    module = getattr(torch, device_type, None)
    if module is None or not module.is_available():
        return None
    properties = module.get_device_properties(0)
    return DeviceLimit(int(properties.total_memory), str(properties.name))


def available_memory(groups: Path = _CGROUPS, own: Path = _OWN_CGROUP) -> int:
    """Return the bytes that new processes of this machine, or of its control group, can use."""
    import psutil

    # A line of /proc/self/cgroup is number:controllers:path, with number 0 in version 2. In a
    # container the path can be one of the host, and the files are in the top folder.
    lines = own.read_text().splitlines() if own.is_file() else []
    parts = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    paths = [path.lstrip("/") for _, kind, path in parts if kind in ("", "memory")]
    folders = [top / path for top in (groups, groups / "memory") for path in (*paths, "")]
    limits = [left for folder in folders if (left := _left(folder)) is not None]
    return min([int(psutil.virtual_memory().available), *limits])


def _left(folder: Path) -> int | None:
    """Return the limit of a control group less its use; None if it has no limit."""
    for limit, use, reclaimable in _FILES:
        texts = [(folder / name).read_text().strip() for name in (limit, use)
                 if (folder / name).is_file()]  # fmt: skip
        if len(texts) == 2 and texts[0].isdecimal():  # "max" is no limit
            statistics = folder / "memory.stat"
            rows = statistics.read_text().splitlines() if statistics.is_file() else []
            kept = dict(row.split(maxsplit=1) for row in rows)
            return max(0, int(texts[0]) - int(texts[1]) + int(kept.get(reclaimable, 0)))
    return None
