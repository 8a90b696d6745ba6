"""Measure wall time, CPU time and memory of the controller over repeated steps."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return 0


def reset_peak() -> int:
    """Reset the memory peak of this process. Return the memory in use now, in bytes."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _status("VmRSS")


WARM = 12
"""Steps before the measured ones. Ray's store writes several times more slowly to memory that was
never touched; after these steps all of its memory has been touched."""


def repeat(step: Callable[[], Any], times: int, warmup: int = WARM) -> dict[str, float]:
    """Run `step` `warmup` + `times` times and return medians over the last `times` runs.

    `wall_s`: seconds. `cpu_s`: CPU seconds of all threads of this process. `extra_bytes`: the
    memory peak of all runs above the memory in use before them.
    """
    for _ in range(warmup):
        step()
    before = reset_peak()
    walls, cpus = [], []
    for _ in range(times):
        cpu, wall = time.process_time(), time.perf_counter()
        step()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return {
        "wall_s": statistics.median(walls),
        "wall_min_s": min(walls),
        "cpu_s": statistics.median(cpus),
        "extra_bytes": max(_status("VmHWM") - before, 0),
        "runs": times,
    }


def machine() -> dict[str, Any]:
    """Return the properties of this machine that affect the figures."""
    import platform

    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }
