"""The heap of a process: memory that is freed stays, and what stays is not searched for garbage.

glibc hands large blocks back to the system as soon as they are free, and every page of the next
ones costs a fault. A training step frees and takes the same sizes again and again.

Python's collector now and then looks through all objects there are. Half a million of them belong
to torch, Ray and other libraries, which takes it a sixth of a second; the controller of a thousand
ranks makes enough small objects for that to happen at every second call.
"""

from __future__ import annotations

import ctypes
import gc
import os

KEPT_BYTES = 256 * 2**20
"""A process keeps at most so much at the end of its heap; glibc's own rule ends at 64 MiB."""
_LARGEST_BLOCK = 32 * 2**20
"""Larger blocks always come from the system: glibc allows no more."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_USERS_CHOICE = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Tell glibc so; False where the user's environment says otherwise, or where there is no
    glibc."""
    if any(name in os.environ for name in _USERS_CHOICE):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    return bool(kept and mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK))


def freeze_heap(collect: bool = True) -> None:
    """Take what lives now out of the collector's sight, for good. `collect`: look for garbage
    first; it would be kept for good too."""
    if collect:
        gc.collect()
    gc.freeze()
