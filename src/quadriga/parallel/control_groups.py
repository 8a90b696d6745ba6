"""The CPUs and the memory of this machine that its control groups leave to this process.

A container, a job of a scheduler or a service is a control group (cgroup). A group lies in others,
and gets no more than any of them: the smallest limit of the chain counts.

    job/memory.max        8 GiB, of which 3 are used        5 GiB of memory are left,
    job/cpu.max           200000 100000: 2 CPUs             and 2 CPUs
    job/step/memory.max   16 GiB, of which 1 is used
    job/step/cpu.max      max
"""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")

# Files of the limit, of the use, and of the part of the use that the kernel gives up when needed,
# for version 2 and version 1 of control groups.
MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_memory(groups: Path = GROUPS, own: Path = OWN) -> int:
    """Return the bytes that new processes of this process can use."""
    limits = [left for folder in _chain("memory", groups, own) if (left := _left(folder)) >= 0]
    return min([int(psutil.virtual_memory().available), *limits])


def available_cpus(groups: Path = GROUPS, own: Path = OWN) -> int:
    """Return the number of CPUs that this process can use, 1 at least: its affinity, or the quota
    of a control group, of which 2.5 are 2."""
    quotas = [quota for folder in _chain("cpu", groups, own) if (quota := _quota(folder)) > 0]
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def _chain(controller: str, groups: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of the own control groups and of all that they lie in."""
    # A line of /proc/self/cgroup is number:controllers:path, with number 0 in version 2. In a
    # container the path can be one of the host, and the files are in the top folder.
    lines = own.read_text().splitlines() if own.is_file() else []
    tops = {groups: {Path()}, groups / controller: {Path()}}
    for line in lines:
        _, kinds, path = [*line.split(":", 2), "", ""][:3]
        if (not kinds or controller in kinds.split(",")) and ".." not in path.split("/"):
            inside = Path(path.lstrip("/"))
            for top in (groups, groups / (kinds or "unified"), groups / controller):
                tops.setdefault(top, {Path()}).update([inside, *inside.parents])
    for top, inner in tops.items():
        yield from (top / path for path in inner)


def _left(folder: Path) -> int:
    """Return the limit of a control group less its use; -1 if it has no limit."""
    for limit, use, reclaimable in MEMORY_FILES:
        words = _words(folder / limit), _words(folder / use)
        if all(words) and words[0][0].isdecimal():  # "max" is no limit
            kept = _words(folder / "memory.stat")
            given_up = dict(zip(kept[::2], kept[1::2], strict=False)).get(reclaimable, "0")
            return max(0, int(words[0][0]) - int(words[1][0]) + int(given_up))
    return -1


def _quota(folder: Path) -> float:
    """Return the CPUs of a control group; 0 if it has no quota."""
    files = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    for names in files:
        words = [word for name in names for word in _words(folder / name)]
        if len(words) == 2 and words[0].isdecimal():  # "max" and "-1" are no quota
            return int(words[0]) / int(words[1])
    return 0.0


def _words(file: Path) -> list[str]:
    return file.read_text().split() if file.is_file() else []
