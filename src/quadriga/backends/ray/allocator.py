"""Memory that a rank's process frees stays with it, up to a limit.

glibc hands large blocks back to the system as soon as they are free, and every page of the next
ones costs a fault. A training step frees and takes the same sizes again and again.
"""

from __future__ import annotations

import ctypes
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
